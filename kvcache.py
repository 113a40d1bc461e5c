"""The paged KV cache: memory in pages, who holds them, and the index that finds a cached prefix again.

Owns the tensors that keys and values lie in, page tables, reference counts and the prefix index. Knows nothing of
requests or scheduling: a request's hold on the cache is a `Lease`. Start at `Cache`.

Layers with the same spec form a group; a group has its own pool of pages, since groups release pages at different
times. A full page is published under a key that chains the key of the page before it with the page's tokens, so equal
keys mean equal prefixes. A published page that nobody holds stays cached until its memory is wanted, the longest unheld
first.
"""

import contextlib
import math
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path

import torch

import kernels


@dataclass(frozen=True)
class KVSpec:
    """What one layer keeps of a token: `heads` keys of `k_dim` and values of `v_dim`; `window` 0 sees everything."""

    heads: int
    k_dim: int
    v_dim: int
    window: int = 0

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """In memory of `dtype`; int8 comes with a float32 scale for each key and each value."""
        num_scales = 2 * (dtype == torch.int8)
        return self.heads * ((self.k_dim + self.v_dim) * dtype.itemsize + 4 * num_scales)


class Pool:
    """One group's pages: each is free, held (by one or more leases), or cached (published, held by none)."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.free = list(reversed(range(num_pages)))
        self.holders = [0] * num_pages
        self.keys: list[bytes | None] = [None] * num_pages
        self.index: dict[bytes, int] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()  # longest unheld first
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    def take(self, num_pages: int) -> list[int]:
        """Pages to write to, held once; where too few are free, the longest unheld cached ones are evicted."""
        num_free = min(num_pages, len(self.free))
        page_ids = self.free[len(self.free) - num_free :]
        del self.free[len(self.free) - num_free :]
        for _ in range(num_pages - num_free):
            page_id, _ = self.cached.popitem(last=False)
            del self.index[self.keys[page_id]]
            self.keys[page_id] = None
            self.num_evictions += 1
            page_ids.append(page_id)
        for page_id in page_ids:
            self.holders[page_id] = 1
        return page_ids

    def hold(self, page_id: int) -> None:
        self.holders[page_id] += 1
        self.cached.pop(page_id, None)

    def drop(self, page_id: int) -> None:
        self.holders[page_id] -= 1
        if self.holders[page_id] == 0:
            if self.keys[page_id] is None:
                self.free.append(page_id)
            else:
                self.cached[page_id] = None

    def publish(self, page_id: int, key: bytes) -> None:
        """Lets others find a full page. Of two pages with equal content the first stays the known one."""
        if key not in self.index:
            self.index[key] = page_id
            self.keys[page_id] = key


@dataclass
class Lease:
    """One request's hold on the cache: per group its page ids in order (None: out of a window's sight, not held), how
    many pages it may come to hold, and the row of its page table.

    `keys` are the chained keys of the sequence's full pages as far as they were computed; they outlive a release,
    since the tokens stay the same.
    """

    pages: list[list[int | None]] = field(default_factory=list)
    promised: list[int] = field(default_factory=list)
    row: int | None = None
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0  # pages
    writes: list[bytes] = field(default_factory=list)  # keys of the pages it is to publish, not yet published

    @property
    def num_pages(self) -> int:
        """Pages that its tokens take, held or promised."""
        return max(self.promised, default=0)


class Group:
    """Layers with the same spec: their pages, and the page table of each lease.

    Full layers get pages for all tokens at once. Layers with a window get a promise of as many as a request can ever
    need at a time (`most_pages`), take them chunk by chunk, and drop what falls out of the window.
    """

    def __init__(self, spec: KVSpec, num_pages: int, page_size: int, max_leases: int, max_tokens: int,
                 max_step_tokens: int):
        self.window, self.page_size = spec.window, page_size
        self.most_pages = table_width = -(-max_tokens // page_size)
        if self.window:
            self.most_pages = min(self.most_pages, (self.window + max_step_tokens) // page_size + 2)
        else:
            table_width = min(table_width, num_pages)
        self.pool = Pool(min(num_pages, max_leases * self.most_pages))
        self.cells = array("i", bytes(4 * max_leases * table_width))  # lists become cells faster than tensors
        self.table = torch.frombuffer(self.cells, dtype=torch.int32).view(max_leases, table_width)
        self.num_promised = 0

    @property
    def num_available(self) -> int:
        """Pages that could be promised now."""
        return self.pool.num_pages - self.num_promised if self.window else self.pool.num_available

    def first_in_sight(self, place: int) -> int:
        """The first page that the token at `place` sees."""
        return max(0, place + 1 - self.window) // self.page_size if self.window else 0

    def slots(self, row: int, start: int, end: int) -> list[int]:
        """Where the lease in that row of the table keeps its tokens `start` to `end`: page id * page size + place."""
        first, size = row * self.table.shape[1], self.page_size
        return [self.cells[first + place // size] * size + place % size for place in range(start, end)]

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """How many of these pages are here before the first that is not."""
        return sum(1 for _ in takewhile(self.pool.index.__contains__, keys))

    def runs(self, keys: Sequence[bytes]) -> list[int]:
        """For n = 0, 1, ... len(keys): how many of the last pages before n are here without a gap."""
        runs = [0]
        for key in keys:
            runs.append(runs[-1] + 1 if key in self.pool.index else 0)
        return runs


class Cache:
    """`num_pages` pages of `page_size` tokens for every layer, in memory of `dtype` on `device`.

    At most `max_leases` leases are open at a time, each of at most `max_tokens` tokens (None: the whole cache),
    computed in chunks of at most `max_step_tokens`. `prefix=False` publishes nothing and so never hits. `domain` goes
    into every key: whatever else the keys and values depend on. `new_kv` makes a layer's memory, as in kernels.py.
    """

    def __init__(self, specs: Sequence[KVSpec], num_pages: int, page_size: int, dtype: torch.dtype,
                 device: str | torch.device = "cpu", max_leases: int = 64, max_tokens: int | None = None,
                 max_step_tokens: int = 512, prefix: bool = True, domain: str = "",
                 new_kv: Callable = kernels.new_kv):
        self.page_size, self.num_pages, self.prefix = page_size, num_pages, prefix
        self.device = torch.device(device)  # where the tables' readers compute, too
        self.root = blake2b(domain.encode(), digest_size=16).digest()  # key of the empty prefix
        kinds = list(dict.fromkeys(specs))
        max_tokens = num_pages * page_size if max_tokens is None else max_tokens
        self.groups = [Group(spec, num_pages, page_size, max_leases, max_tokens, max_step_tokens) for spec in kinds]
        self.layers = []
        for spec in specs:
            group = kinds.index(spec)
            self.layers.append(new_kv(self.groups[group].pool.num_pages, page_size, spec.heads, spec.k_dim, spec.v_dim,
                                      dtype, device, group))
        self.free_rows = list(reversed(range(max_leases)))
        self.being_written: dict[bytes, Lease] = {}  # keys of prompts' pages, and the lease that will publish them

    @property
    def num_available(self) -> int:
        """Pages that could be had now in every group."""
        return min(group.num_available for group in self.groups)

    @property
    def num_available_full(self) -> float:
        """The same of layers that see everything; those with a window always have what one lease can need."""
        return min((group.num_available for group in self.groups if not group.window), default=math.inf)

    @property
    def capacity(self) -> float:
        """Tokens that one lease can hold; layers with windows set no limit if their window fits."""
        return min(math.inf if group.window and group.pool.num_pages >= group.most_pages
                   else group.pool.num_pages * self.page_size for group in self.groups)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def open(self, lease: Lease) -> None:
        """Gives a closed lease a page table, of no pages."""
        lease.row = self.free_rows.pop()
        lease.pages = [[] for _ in self.groups]
        lease.promised = [0] * len(self.groups)
        lease.num_published = 0

    def match(self, lease: Lease, tokens: Sequence[int]) -> int:
        """Puts the longest cached prefix of `tokens` into a lease of no pages; returns how many tokens it covers.

        At least one token is left to compute: the last one's logits are wanted. The pages found are held from now on;
        of layers with a window those that the next token sees.
        """
        lease.num_published = num_hit = self._find(lease, tokens)
        for place, group in enumerate(self.groups):
            first = group.first_in_sight(num_hit * self.page_size)
            page_ids = [group.pool.index[key] for key in lease.keys[first:num_hit]]
            for page_id in page_ids:
                group.pool.hold(page_id)
            lease.pages[place] = [None] * first
            self._append_pages(lease, place, page_ids)
        return num_hit * self.page_size

    def count_cached(self, tokens: Sequence[int]) -> int:
        """How many tokens `match` would find now."""
        return self._find(Lease(), tokens) * self.page_size

    def _find(self, lease: Lease, tokens: Sequence[int]) -> int:
        """Pages of the longest prefix of which every group has what the next token sees."""
        if not self.prefix:
            return 0
        num_whole = max(0, len(tokens) - 1) // self.page_size
        self._extend_keys(lease, tokens, num_whole)
        num_hit = min((group.num_leading(lease.keys[:num_whole]) for group in self.groups if not group.window),
                      default=num_whole)
        windows = [(group, group.runs(lease.keys[:num_hit])) for group in self.groups if group.window]
        return next(n for n in range(num_hit, -1, -1)
                    if all(run[n] >= n - group.first_in_sight(n * self.page_size) for group, run in windows))

    def awaited(self, lease: Lease, tokens: Sequence[int]) -> bytes | None:
        """Key of the page after those that `match` found, if it is being written under another lease: worth waiting
        for."""
        has_next = self.prefix and lease.num_published < (len(tokens) - 1) // self.page_size
        key = lease.keys[lease.num_published] if has_next else None
        return key if key in self.being_written else None

    def grow(self, lease: Lease, num_tokens: int, spare: int = 0, writes: int = 0) -> bool:
        """Gives an open lease room for `num_tokens` tokens in all, if `spare` pages are left over then (of a group with
        a window as large a part of its pages); else False, and nothing changed. The pages that the first `writes`
        tokens fill are announced: others may wait for them instead of computing the same."""
        wanted = [min(self.pages_for(num_tokens), group.most_pages) for group in self.groups]
        for place, group in enumerate(self.groups):
            num_lacking = wanted[place] - (lease.promised[place] if group.window else len(lease.pages[place]))
            kept = spare * group.pool.num_pages // self.num_pages if group.window else spare
            if num_lacking > 0 and num_lacking + kept > group.num_available:
                return False
        for place, group in enumerate(self.groups):
            group.num_promised += max(0, wanted[place] - lease.promised[place])
            lease.promised[place] = max(wanted[place], lease.promised[place])
            if not group.window:
                self._take(lease, place, wanted[place])
        if writes and self.prefix:
            new = lease.keys[lease.num_published : writes // self.page_size]
            lease.writes = [key for key in new if key not in self.being_written]
            self.being_written.update(dict.fromkeys(lease.writes, lease))
        return True

    def reach(self, lease: Lease, start: int, end: int) -> None:
        """Makes ready for a chunk of tokens: layers with a window drop what its first token does not see any more, and
        take, of what is promised, pages for its last."""
        for place, group in enumerate(self.groups):
            if group.window:
                pages = lease.pages[place]
                for i in range(group.first_in_sight(start) - 1, -1, -1):
                    if i >= len(pages) or pages[i] is None:
                        break
                    group.pool.drop(pages[i])
                    pages[i] = None
                self._take(lease, place, self.pages_for(end))

    def slots(self, moves: Sequence[tuple[int, int, int]]) -> list[list[torch.Tensor]]:
        """For moves (row of the page table, place, other place), of each group: the slots of all places, and of all the
        other ones."""
        return [[kernels.sent(torch.tensor([group.slots(move[0], move[i], move[i] + 1)[0] for move in moves]),
                              self.device) for group in self.groups] for i in (1, 2)]

    def publish(self, lease: Lease, tokens: Sequence[int], num_computed: int) -> None:
        """Publishes the lease's pages that `num_computed` tokens have filled since the last call."""
        num_full = num_computed // self.page_size
        if not self.prefix or num_full <= lease.num_published:
            return
        self._extend_keys(lease, tokens, num_full)
        for i in range(lease.num_published, num_full):
            for group, pages in zip(self.groups, lease.pages):
                group.pool.publish(pages[i], lease.keys[i])
        lease.num_published = num_full
        index = self.groups[0].pool.index
        self._end_writes(lease, sum(1 for _ in takewhile(index.__contains__, lease.writes)))

    def release(self, lease: Lease) -> None:
        """Closes an open lease. Published pages stay cached."""
        for group, pages, num_promised in zip(self.groups, lease.pages, lease.promised):
            for page_id in reversed(pages):  # tails first: a prefix must outlive what follows it
                if page_id is not None:
                    group.pool.drop(page_id)
            group.num_promised -= num_promised
        self._end_writes(lease, len(lease.writes))
        lease.pages, lease.promised = [], []
        self.free_rows.append(lease.row)
        lease.row = None

    def _end_writes(self, lease: Lease, num_keys: int) -> None:
        for key in lease.writes[:num_keys]:
            del self.being_written[key]
        lease.writes = lease.writes[num_keys:]

    def _take(self, lease: Lease, place: int, num_pages: int) -> None:
        num_new = num_pages - len(lease.pages[place])
        if num_new > 0:
            self._append_pages(lease, place, self.groups[place].pool.take(num_new))

    def _append_pages(self, lease: Lease, place: int, page_ids: list[int]) -> None:
        if page_ids:
            group, held = self.groups[place], lease.pages[place]
            first = lease.row * group.table.shape[1] + len(held)
            group.cells[first : first + len(page_ids)] = array("i", page_ids)
            held.extend(page_ids)

    def _extend_keys(self, lease: Lease, tokens: Sequence[int], num_pages: int) -> None:
        first, nbytes = len(lease.keys), 4 * self.page_size
        if num_pages <= first:
            return
        raw = array("i", tokens[first * self.page_size : num_pages * self.page_size]).tobytes()
        key = lease.keys[-1] if lease.keys else self.root
        for offset in range(0, len(raw), nbytes):
            key = blake2b(key + raw[offset : offset + nbytes], digest_size=16).digest()
            lease.keys.append(key)


def free_memory_bytes(device: str | torch.device = "cpu") -> int:
    """Memory that can be had: of a GPU its own, else without swapping, of the machine's and of what a container may
    use."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min([free, *(max(0, limit - used) for limit, used in group_memory(Path("/sys/fs/cgroup")))])


def group_memory(cgroup: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of the control group's memory, less what it can give back at once, in bytes; nothing without a
    limit."""
    for folder, limit, used, given_back in ((cgroup, "memory.max", "memory.current", "inactive_file"),
                                            (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                             "total_inactive_file")):
        with contextlib.suppress(OSError, ValueError, KeyError):  # another version of groups, or "max"
            fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield (int((folder / limit).read_text()),
                   int((folder / used).read_text()) - int(fields[given_back]))
