"""The paged KV cache: memory in pages, who holds them, and the index that finds a cached prefix again.

Owns the tensors that keys and values lie in, page tables, reference counts and the prefix index. Knows nothing of
requests or scheduling: a request's hold on the cache is a `Lease`. Start at `Cache`.

Layers with the same spec form a group; a group has its own pool of pages, since groups release pages at different
times. A full page is published under a key that chains the key of the page before it with the page's tokens, so equal
keys mean equal prefixes. A published page that nobody holds stays cached until its memory is wanted, the longest unheld
first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile

import torch

from kernels import KV


@dataclass(frozen=True)
class KVSpec:
    """What one layer keeps of a token: `heads` keys of `k_dim` and values of `v_dim`; `window` 0 sees everything."""

    heads: int
    k_dim: int
    v_dim: int
    window: int = 0

    def values_per_token(self) -> int:
        return self.heads * (self.k_dim + self.v_dim)


class Pool:
    """One group's pages: each is free, held (by one or more leases), or cached (published, held by none)."""

    def __init__(self, num_pages: int):
        self.free = list(reversed(range(num_pages)))
        self.holders = [0] * num_pages
        self.keys: list[bytes | None] = [None] * num_pages
        self.index: dict[bytes, int] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()  # longest unheld first
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    def take(self) -> int:
        """A page to write to, held once; the longest unheld cached page is evicted if none is free."""
        if self.free:
            page_id = self.free.pop()
        else:
            page_id, _ = self.cached.popitem(last=False)
            del self.index[self.keys[page_id]]
            self.keys[page_id] = None
            self.num_evictions += 1
        self.holders[page_id] = 1
        return page_id

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
    """One request's hold on the cache: per group the ids of its pages in order, and the row of its page table.

    `keys` are the chained keys of the sequence's full pages as far as they were computed; they outlive a release,
    since the tokens stay the same.
    """

    pages: list[list[int]] = field(default_factory=list)
    row: int | None = None
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0  # pages
    writes: list[bytes] = field(default_factory=list)  # keys of the pages it is to publish, not yet published

    @property
    def num_pages(self) -> int:
        """Pages of each group."""
        return len(self.pages[0]) if self.pages else 0


class Cache:
    """`num_pages` pages of `page_size` tokens for every layer, in memory of `dtype` on `device`.

    At most `max_leases` leases are open at a time, each of at most `max_tokens` tokens (None: the whole cache).
    `prefix=False` publishes nothing and so never hits.
    """

    def __init__(self, specs: Sequence[KVSpec], num_pages: int, page_size: int, dtype: torch.dtype,
                 device: str | torch.device = "cpu", max_leases: int = 64, max_tokens: int | None = None,
                 prefix: bool = True):
        self.page_size, self.num_pages, self.prefix = page_size, num_pages, prefix
        groups = list(dict.fromkeys(specs))
        self.layers = []
        for spec in specs:
            k_PBGA = torch.empty(num_pages, page_size, spec.heads, spec.k_dim, dtype=dtype, device=device)
            v_PBGA = torch.empty(num_pages, page_size, spec.heads, spec.v_dim, dtype=dtype, device=device)
            self.layers.append(KV(k_PBGA, v_PBGA, groups.index(spec)))
        self.pools = [Pool(num_pages) for _ in groups]
        table_width = num_pages if max_tokens is None else min(num_pages, self.pages_for(max_tokens))
        self.tables = [torch.zeros(max_leases, table_width, dtype=torch.int32) for _ in groups]
        self.free_rows = list(reversed(range(max_leases)))
        self.being_written: set[bytes] = set()  # keys of prompts' pages that some lease is about to publish

    @property
    def num_available(self) -> int:
        """Pages that could be taken now: free or cached."""
        return min(pool.num_available for pool in self.pools)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def open(self, lease: Lease) -> None:
        """Gives a closed lease a page table, of no pages."""
        lease.row = self.free_rows.pop()
        lease.pages = [[] for _ in self.pools]
        lease.num_published = 0

    def match(self, lease: Lease, tokens: Sequence[int]) -> int:
        """Puts the longest cached prefix of `tokens` into a lease of no pages; returns how many tokens it covers.

        At least one token is left to compute: the last one's logits are wanted. The pages found are held from now on.
        """
        if not self.prefix:
            return 0
        num_whole = (len(tokens) - 1) // self.page_size
        self._extend_keys(lease, tokens, num_whole)
        found = [[pool.index.get(key) for key in lease.keys[:num_whole]] for pool in self.pools]
        while lease.num_published < num_whole and all(ids[lease.num_published] is not None for ids in found):
            lease.num_published += 1
        for group, (pool, page_ids) in enumerate(zip(self.pools, found)):
            for page_id in page_ids[: lease.num_published]:
                pool.hold(page_id)
            self._append_pages(lease, group, page_ids[: lease.num_published])
        return lease.num_published * self.page_size

    def count_cached(self, tokens: Sequence[int]) -> int:
        """How many tokens `match` would find now."""
        lease = Lease()
        self._extend_keys(lease, tokens, (len(tokens) - 1) // self.page_size)
        hits = takewhile(lambda key: all(key in pool.index for pool in self.pools), lease.keys)
        return self.page_size * sum(1 for _ in hits)

    def awaits(self, lease: Lease, tokens: Sequence[int]) -> bool:
        """Whether the page after those that `match` found is being written under another lease: worth waiting for."""
        has_next = self.prefix and lease.num_published < (len(tokens) - 1) // self.page_size
        return has_next and lease.keys[lease.num_published] in self.being_written

    def grow(self, lease: Lease, num_tokens: int, writes: int = 0) -> bool:
        """Gives an open lease pages for `num_tokens` tokens in all. False, with nothing changed, if there are too few.
        The pages that the first `writes` tokens fill are announced: others may wait for them instead of computing the
        same."""
        num_wanted = self.pages_for(num_tokens)
        for pages, pool in zip(lease.pages, self.pools):
            if num_wanted - len(pages) > pool.num_available:
                return False
        for group, pages in enumerate(lease.pages):
            self._append_pages(lease, group, [self.pools[group].take() for _ in range(num_wanted - len(pages))])
        if writes and self.prefix:
            new = lease.keys[lease.num_published : writes // self.page_size]
            lease.writes = [key for key in new if key not in self.being_written]
            self.being_written.update(lease.writes)
        return True

    def publish(self, lease: Lease, tokens: Sequence[int], num_computed: int) -> None:
        """Publishes the lease's pages that `num_computed` tokens have filled since the last call."""
        num_full = num_computed // self.page_size
        if not self.prefix or num_full <= lease.num_published:
            return
        self._extend_keys(lease, tokens, num_full)
        for i in range(lease.num_published, num_full):
            for pool, pages in zip(self.pools, lease.pages):
                pool.publish(pages[i], lease.keys[i])
        lease.num_published = num_full
        self._end_writes(lease, [key for key in lease.writes if key in self.pools[0].index])

    def release(self, lease: Lease) -> None:
        """Closes an open lease. Published pages stay cached."""
        for pool, pages in zip(self.pools, lease.pages):
            for page_id in reversed(pages):  # tails first: a prefix must outlive what follows it
                pool.drop(page_id)
        self._end_writes(lease, lease.writes)
        lease.pages = []
        self.free_rows.append(lease.row)
        lease.row = None

    def _end_writes(self, lease: Lease, keys: Sequence[bytes]) -> None:
        self.being_written.difference_update(keys)
        lease.writes = lease.writes[len(keys) :]

    def _append_pages(self, lease: Lease, group: int, page_ids: list[int]) -> None:
        if page_ids:
            held = lease.pages[group]
            self.tables[group][lease.row, len(held) : len(held) + len(page_ids)] = torch.tensor(page_ids)
            held.extend(page_ids)

    def _extend_keys(self, lease: Lease, tokens: Sequence[int], num_pages: int) -> None:
        for i in range(len(lease.keys), num_pages):
            page_tokens = array("i", tokens[i * self.page_size : (i + 1) * self.page_size])
            parent = lease.keys[-1] if lease.keys else b""
            lease.keys.append(blake2b(parent + page_tokens.tobytes(), digest_size=16).digest())
