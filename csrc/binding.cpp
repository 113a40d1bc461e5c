// The only file that knows torch: tensors in, pointers out, and a Python error where a kernel refuses its arguments.
//
// While a Recording is open, every call is also written down; replay() makes the same calls again, on the same memory,
// without Python. What changes between steps (tokens, positions, lengths) is therefore read from tensors, never passed
// as a number.
#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace py = pybind11;
using at::Tensor;

namespace {

// Buffers and recordings ----------------------------------------------------------------------------------------------

// Memory for results, used again once nobody holds it: a step's tensors cost no allocation. Never smaller than the
// largest step there was.
struct Buffers {
    std::vector<Tensor> all;

    // An uninitialised float32 tensor on the smallest buffer that is large enough and that nobody holds.
    Tensor fresh(at::IntArrayRef sizes) {
        const int64_t num = c10::multiply_integers(sizes);
        const Tensor* best = nullptr;
        for (const Tensor& buffer : all)
            if (buffer.numel() >= num && buffer.storage().use_count() == 1 && (!best || buffer.numel() < best->numel()))
                best = &buffer;
        // A buffer far too large would be missing where it is needed.
        if (!best || best->numel() > 2 * num + 4096) {
            all.push_back(at::empty({num}, at::kFloat));
            best = &all.back();
        }
        return best->narrow(0, 0, num).view(sizes);
    }
};

using Call = std::function<int()>;

// Calls to be made again, with results in buffers that only recordings made one after the other share.
struct Recording {
    std::shared_ptr<Buffers> buffers;
    std::vector<std::pair<const char*, Call>> calls;
    std::vector<Tensor> kept;   // what the calls read and write, buffers aside
};

thread_local Recording* open_recording = nullptr;

Tensor fresh(at::IntArrayRef sizes) {
    static auto* const shared = new Buffers;
    return (open_recording ? open_recording->buffers.get() : shared)->fresh(sizes);
}

void check(const char* name, int status) {
    static const char* const reasons[] = {"", "a format it does not serve", "sizes it does not serve",
                                          "an index out of range", "no memory left", "instructions this CPU lacks"};
    if (status == NO_MEMORY) throw std::bad_alloc();
    if (status != OK) throw py::value_error(std::string(name) + ": " + reasons[status]);
}

void run(const char* name, std::initializer_list<Tensor> kept, Call call) {
    int status;
    {
        py::gil_scoped_release others_may_run;
        status = call();
    }
    check(name, status);
    if (!open_recording) return;
    open_recording->calls.emplace_back(name, std::move(call));
    for (const Tensor& tensor : kept) open_recording->kept.push_back(tensor);
}

void replay(const Recording& recording) {
    for (const auto& [name, call] : recording.calls) check(name, call());
}

// The data of a CPU tensor without gaps, of the type that T stands for.
template <class T>
T* data(const Tensor& tensor, const char* name) {
    if (!tensor.is_cpu() || !tensor.is_contiguous() || tensor.scalar_type() != c10::CppTypeToScalarType<T>::value)
        throw py::value_error(std::string(name) + " must be a contiguous CPU tensor of " +
                              c10::toString(c10::CppTypeToScalarType<T>::value));
    return tensor.data_ptr<T>();
}

#define FLOATS(tensor) data<float>(tensor, #tensor)
#define INTS(tensor) data<int64_t>(tensor, #tensor)

void expect(bool holds, const char* what) {
    if (!holds) throw py::value_error(what);
}

// Matrices ------------------------------------------------------------------------------------------------------------

struct Packed {
    std::vector<Part> parts;
    std::vector<Tensor> memory;
    int64_t O = 0, I;

    Packed(const std::vector<std::tuple<int, int64_t, Tensor>>& given, int64_t I) : I(I) {
        for (const auto& [format, rows, packed] : given) {
            expect(packed.numel() == pack_bytes_cpu(format, rows, I), "packed does not have the bytes of pack()");
            parts.push_back({format, rows, data<uint8_t>(packed, "packed")});
            memory.push_back(packed);
            O += rows;
        }
    }
};

// The first outputs of a matrix of one part, on the same memory: panels of 16 outputs follow each other.
Packed first_outputs(const Packed& weights, int64_t num) {
    expect(weights.parts.size() == 1 && num > 0 && num <= weights.O && num % 16 == 0,
           "of one part, and a multiple of 16, can be had alone");
    const int32_t format = weights.parts[0].format;
    const Tensor memory = weights.memory[0].narrow(0, 0, pack_bytes_cpu(format, num, weights.I));
    return Packed({{format, num, memory}}, weights.I);
}

// Memory for packed weights, one after the other: what is packed in the order of execution is read as one stream, in
// large pages where the system gives them (a tenth faster here).
Tensor room(int64_t bytes) {
    constexpr int64_t LARGE_PAGE = 2 << 20, CHUNK = 32 << 20;
    static auto* const chunk = new Tensor;
    static int64_t used = 0;
    const int64_t padded = (bytes + 63) / 64 * 64;
    if (!chunk->defined() || used + padded > chunk->numel()) {
        const int64_t size = (std::max(padded, CHUNK) + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
        const Tensor memory = at::empty({size + LARGE_PAGE}, at::kByte);
        *chunk = memory.narrow(0, -reinterpret_cast<intptr_t>(memory.data_ptr()) & (LARGE_PAGE - 1), size);
#ifdef MADV_HUGEPAGE
        madvise(chunk->data_ptr(), size, MADV_HUGEPAGE);
#endif
        used = 0;
    }
    used += padded;
    return chunk->narrow(0, used - padded, bytes);
}

Tensor pack(const Tensor& raw, int format, int64_t O, int64_t I, int64_t raw_bytes) {
    const int64_t bytes = pack_bytes_cpu(format, O, I);
    if (!bytes) throw py::value_error("pack: a format or a shape that the kernels do not serve");
    expect(raw.numel() == raw_bytes, "raw does not have the bytes of its format and shape");
    const Tensor packed = room(bytes);
    check("pack", pack_cpu(packed.data_ptr(), data<uint8_t>(raw, "raw"), format, O, I));
    return packed;
}

using Optional = const std::optional<Tensor>&;
using Count = std::optional<int64_t>;

void multiply(const Tensor& y_TO, const Tensor& x_TI, const Packed& weights, Optional bias_O, Count num_exact,
              bool accumulate) {
    expect(x_TI.dim() == 2 && x_TI.size(1) == weights.I, "x_TI must have as many columns as the weights");
    expect(y_TO.dim() == 2 && y_TO.size(0) == x_TI.size(0) && y_TO.size(1) == weights.O, "y_TO has a wrong shape");
    expect(!bias_O || bias_O->numel() == weights.O, "bias_O must have a number for each output");
    const float* const bias = bias_O ? FLOATS(*bias_O) : nullptr;
    run("linear", {bias_O.value_or(Tensor())},
        [y = FLOATS(y_TO), x = FLOATS(x_TI), &weights, bias, T = x_TI.size(0),
         exact = num_exact.value_or(x_TI.size(0)), accumulate] {
            return matmul_cpu(y, x, weights.parts.data(), bias, T, exact, weights.I, weights.parts.size(), accumulate);
        });
}

Tensor linear(const Tensor& x_TI, const Packed& weights, Optional bias_O, Count num_exact) {
    const Tensor y_TO = fresh({x_TI.size(0), weights.O});
    multiply(y_TO, x_TI, weights, bias_O, num_exact, false);
    return y_TO;
}

void linear_add(const Tensor& y_TO, const Tensor& x_TI, const Packed& weights, Optional bias_O, Count num_exact) {
    multiply(y_TO, x_TI, weights, bias_O, num_exact, true);
}

Tensor embed(const Packed& table, const Tensor& token_T) {
    expect(table.parts.size() == 1, "a table of several parts");
    const Tensor x_TD = fresh({token_T.numel(), table.I});
    run("embed", {token_T}, [x = FLOATS(x_TD), &table, token = INTS(token_T), T = token_T.numel()] {
        return embed_cpu(x, table.parts.data(), token, T, table.I);
    });
    return x_TD;
}

// Rows ----------------------------------------------------------------------------------------------------------------

Tensor rms_norm(const Tensor& x_TD, const Tensor& weight_D, double eps) {
    expect(x_TD.dim() == 2 && x_TD.size(1) == weight_D.numel(), "weight_D must have a number for each column");
    const Tensor out_TD = fresh(x_TD.sizes());
    run("rms_norm", {weight_D}, [out = FLOATS(out_TD), x = FLOATS(x_TD), weight = FLOATS(weight_D), T = x_TD.size(0),
                                 D = x_TD.size(1), eps] { return rms_norm_cpu(out, x, weight, T, D, eps); });
    return out_TD;
}

Tensor silu_mul(const Tensor& x_T2F) {
    expect(x_T2F.dim() == 2 && x_T2F.size(1) % 2 == 0, "x_T2F must have an even number of columns");
    const Tensor act_TF = fresh({x_T2F.size(0), x_T2F.size(1) / 2});
    run("silu_mul", {}, [act = FLOATS(act_TF), x = FLOATS(x_T2F), T = act_TF.size(0), F = act_TF.size(1)] {
        return silu_mul_cpu(act, x, T, F);
    });
    return act_TF;
}

Tensor copy(const Tensor& x_TD) {
    const Tensor out_TD = fresh(x_TD.sizes());
    run("copy", {}, [out = FLOATS(out_TD), x = FLOATS(x_TD), num = x_TD.numel()] {
        std::copy(x, x + num, out);
        return OK;
    });
    return out_TD;
}

// The pointers hold as long as `given` and its tensors.
DrawRules draw_rules(const py::handle& given, uint64_t key) {
    DrawRules rules{};
    const auto number = [&](const char* name) { return given.attr(name).cast<double>(); };
    const auto tensor = [&](const char* name) { return given.attr(name).cast<std::optional<Tensor>>(); };
    rules.vocab = given.attr("vocab").cast<int64_t>();
    rules.temperature = number("temperature");
    rules.top_k = given.attr("top_k").cast<int64_t>();
    rules.top_p = number("top_p"), rules.min_p = number("min_p");
    rules.repetition_penalty = number("repetition_penalty");
    rules.presence_penalty = number("presence_penalty"), rules.frequency_penalty = number("frequency_penalty");
    const auto seen_V = tensor("seen_V"), count_V = tensor("count_V");
    const auto bias_ids = tensor("bias_ids"), biases = tensor("biases");
    expect(!seen_V || seen_V->numel() == rules.vocab, "seen_V must have an entry for each id");
    expect(!count_V || count_V->numel() == rules.vocab, "count_V must have an entry for each id");
    expect(bias_ids ? biases && biases->numel() == bias_ids->numel() : !biases, "biases must be as many as bias_ids");
    if (seen_V) rules.seen_V = data<bool>(*seen_V, "seen_V");
    if (count_V) rules.count_V = data<double>(*count_V, "count_V");
    if (bias_ids) {
        rules.bias_ids = INTS(*bias_ids), rules.biases = data<double>(*biases, "biases");
        rules.num_biases = bias_ids->numel();
    }
    rules.key = key;
    return rules;
}

std::vector<DrawRules> rules_of_rows(const Tensor& x_LV, const std::vector<py::object>& rules,
                                     const std::vector<uint64_t>& keys) {
    expect(x_LV.dim() == 2, "x_LV must have a row for each token");
    const bool complete = int64_t(rules.size()) == x_LV.size(0) && rules.size() == keys.size();
    expect(complete, "each row needs its rules and its key");
    std::vector<DrawRules> rules_L;
    for (size_t l = 0; l < rules.size(); l++) rules_L.push_back(draw_rules(rules[l], keys[l]));
    return rules_L;
}

Tensor draw(const Tensor& x_LV, const std::vector<py::object>& rules, const std::vector<uint64_t>& keys) {
    const std::vector<DrawRules> rules_L = rules_of_rows(x_LV, rules, keys);
    const Tensor id_L = at::empty({x_LV.size(0)}, at::kLong);
    check("draw", draw_cpu(INTS(id_L), FLOATS(x_LV), rules_L.data(), x_LV.size(0), x_LV.size(1)));
    return id_L;
}

Tensor distribution(const Tensor& x_LV, const std::vector<py::object>& rules) {
    const std::vector<DrawRules> rules_L = rules_of_rows(x_LV, rules, std::vector<uint64_t>(rules.size()));
    const Tensor p_LV = fresh({x_LV.size(0), 2 * x_LV.size(1)}).view(at::kDouble);
    check("distribution", distribution_cpu(data<double>(p_LV, "p_LV"), FLOATS(x_LV), rules_L.data(), x_LV.size(0),
                                           x_LV.size(1)));
    return p_LV;
}

// Attention -----------------------------------------------------------------------------------------------------------

int32_t cache_format(at::ScalarType dtype) {
    if (dtype == at::kFloat) return F32;
    if (dtype == at::kBFloat16) return BF16;
    if (dtype == at::kChar) return I8;
    throw py::value_error("the cache must be float32, bfloat16 or int8");
}

// A layer's keys or values: (pages, G, what a head has in a page).
void expect_cache(const Tensor& cache, int64_t A, int64_t B) {
    expect(cache.dim() == 3 && cache.is_contiguous() &&
           cache.size(2) * cache.element_size() == kv_head_bytes_cpu(A, B, cache_format(cache.scalar_type())),
           "a cache of other heads or pages");
}

std::tuple<Tensor, Tensor> rope_angles(const Tensor& position_T, const Tensor& inv_freq, double scale) {
    const int64_t T = position_T.numel(), half = inv_freq.numel();
    const Tensor cos = fresh({T, half}), sin = fresh({T, half});
    run("rope_angles", {position_T, inv_freq}, [c = FLOATS(cos), s = FLOATS(sin), position = INTS(position_T),
                                                freq = data<double>(inv_freq, "inv_freq"), T, half, scale] {
        return rope_angles_cpu(c, s, position, freq, T, half, scale);
    });
    return {cos, sin};
}

Tensor rope_store(const Tensor& k_cache, const Tensor& v_cache, const Tensor& qkv_TX, const Tensor& cos,
                  const Tensor& sin, const Tensor& slot_T, int64_t H, int64_t A, int64_t B) {
    const int64_t T = qkv_TX.size(0), G = k_cache.size(1), half = cos.size(-1), num_pages = k_cache.size(0);
    expect_cache(k_cache, A, B), expect_cache(v_cache, A, B);
    expect(qkv_TX.numel() == T * (H + 2 * G) * A && slot_T.numel() == T, "qkv_TX or slot_T has a wrong shape");
    expect(cos.numel() == T * half && sin.numel() == T * half, "cos and sin must have a row for each token");
    const Tensor q_THA = fresh({T, H, A});
    run("rope_store", {k_cache, v_cache, slot_T},
        [q = FLOATS(q_THA), k = k_cache.data_ptr(), v = v_cache.data_ptr(), qkv = FLOATS(qkv_TX), c = FLOATS(cos),
         s = FLOATS(sin), slot = INTS(slot_T), T, H, G, A, half, B, num_pages,
         format = cache_format(k_cache.scalar_type())] {
            return rope_store_cpu(q, k, v, qkv, c, s, slot, T, H, G, A, half, B, num_pages, format);
        });
    return q_THA;
}

// Of the heads of a cache, or more, by what only pads them.
int64_t head_width(const Tensor& cache, int64_t B) {
    int64_t A = 16;
    while (kv_head_bytes_cpu(A, B, cache_format(cache.scalar_type())) < cache.size(2) * cache.element_size() && A < 512)
        A += 16;
    expect_cache(cache, A, B);
    return A;
}

void move_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& from_T, const Tensor& to_T, int64_t B) {
    const int64_t T = from_T.numel(), G = k_cache.size(1), A = head_width(k_cache, B), num_pages = k_cache.size(0);
    expect_cache(v_cache, A, B);
    expect(to_T.numel() == T, "to_T must have a slot for each of from_T");
    run("move_kv", {k_cache, v_cache, from_T, to_T},
        [k = k_cache.data_ptr(), v = v_cache.data_ptr(), from = INTS(from_T), to = INTS(to_T), T, G, A, B, num_pages,
         format = cache_format(k_cache.scalar_type())] {
            return move_kv_cpu(k, v, from, to, T, G, A, B, num_pages, format);
        });
}

Tensor attention(const Tensor& q_THA, const Tensor& k_cache, const Tensor& v_cache, const Tensor& table,
                 const Tensor& row_S, const Tensor& starts_S1, const Tensor& lengths_S, Optional ancestors_T, int64_t B,
                 double scale, int64_t window) {
    const int64_t T = q_THA.size(0), H = q_THA.size(1), A = q_THA.size(2), S = row_S.numel(), G = k_cache.size(1);
    expect_cache(k_cache, A, B), expect_cache(v_cache, A, B);
    expect(starts_S1.numel() == S + 1 && lengths_S.numel() == S, "starts_S1 or lengths_S has a wrong shape");
    expect(!ancestors_T || ancestors_T->numel() == T, "ancestors_T must have a number for each token");
    const Tensor out_THA = fresh(q_THA.sizes());
    run("attention", {k_cache, v_cache, table, row_S, starts_S1, lengths_S, ancestors_T.value_or(Tensor())},
        [out = FLOATS(out_THA), q = FLOATS(q_THA), k = k_cache.data_ptr(), v = v_cache.data_ptr(),
         pages = data<int32_t>(table, "table"), rows = INTS(row_S), starts = INTS(starts_S1), lengths = INTS(lengths_S),
         ancestors = ancestors_T ? INTS(*ancestors_T) : nullptr, T, S, H, G, A, B, num_pages = k_cache.size(0),
         stride = table.size(1), scale, window, format = cache_format(k_cache.scalar_type())] {
            return attention_cpu(out, q, k, v, pages, rows, starts, lengths, ancestors, T, S, H, G, A, B, num_pages,
                                 stride, scale, window, format);
        });
    return out_THA;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    using namespace py::literals;
    py::class_<Packed>(m, "Packed")
        .def(py::init<const std::vector<std::tuple<int, int64_t, Tensor>>&, int64_t>(), py::arg("parts"), py::arg("I"))
        .def_property_readonly("nbytes", [](const Packed& packed) {
            int64_t bytes = 0;
            for (const Tensor& part : packed.memory) bytes += part.numel();
            return bytes;
        });
    py::class_<Buffers, std::shared_ptr<Buffers>>(m, "Buffers").def(py::init<>());
    py::class_<Recording>(m, "Recording", "Every call between `with` and its end; replay() makes them again.")
        .def(py::init([](std::shared_ptr<Buffers> buffers) { return new Recording{std::move(buffers), {}, {}}; }))
        .def("__enter__", [](Recording& recording) { open_recording = &recording; })
        .def("__exit__", [](Recording&, const py::args&) { open_recording = nullptr; })
        .def("replay", &replay, py::call_guard<py::gil_scoped_release>());
    m.def("pack", &pack);
    m.def("first_outputs", &first_outputs);
    m.def("linear", &linear, "x"_a, "weights"_a, "bias"_a = std::nullopt, "num_exact"_a = std::nullopt);
    m.def("linear_add_", &linear_add, "y"_a, "x"_a, "weights"_a, "bias"_a = std::nullopt, "num_exact"_a = std::nullopt);
    m.def("embed", &embed);
    m.def("rms_norm", &rms_norm);
    m.def("silu_mul", &silu_mul);
    m.def("copy", &copy);
    m.def("draw", &draw);
    m.def("distribution", &distribution);
    m.def("rope_angles", &rope_angles);
    m.def("rope_store_", &rope_store);
    m.def("move_kv_", &move_kv);
    m.def("attention", &attention);
    m.def("kv_head_bytes", [](int64_t A, int64_t B, at::ScalarType dtype) {
        return kv_head_bytes_cpu(A, B, cache_format(dtype));
    });
    m.def("set_threads", [](int64_t num) { check("set_threads", set_threads_cpu(num)); });
    m.def("peak", &peak_cpu, py::arg("format"), py::arg("seconds"), py::call_guard<py::gil_scoped_release>());
    m.def("set_isa", [](int64_t level) { check("set_isa", set_isa_cpu(level)); });
}
