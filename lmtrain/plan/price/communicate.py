"""Seconds that a collective or a message takes by itself: algorithm, size, links and latency at scale.

Rings, as the usual libraries choose them for large sizes. Ranks count with tp fastest, then shards, copies and pp
(layout.py), so a group's members in one node follow from the axes' sizes. Knows nothing of what hides behind what.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtrain.plan.price.factors import Factors
from lmtrain.plan.price.workload import Column, Columns


@dataclass(frozen=True)
class Group:
    """Ranks of one collective: how many, how many of them in a node, and the way between them."""

    size: Column
    local: Column
    bytes_per_s: Column  # through the ring's narrowest place
    latency_s: Column  # of one trip round
    tree_s: Column  # the same where sums go by trees

    def shared(self, num_bytes: Column) -> Column:
        """Gather from equal shares, or reduce to them: `num_bytes` is the whole."""
        share = (self.size - 1) / np.maximum(self.size, 1)
        return np.where(self.size > 1, share * num_bytes / self.bytes_per_s + self.latency_s, 0.0)

    def reduced(self, num_bytes: Column) -> Column:
        """Reduce so that all have the sum: both halves of a ring."""
        share = (self.size - 1) / np.maximum(self.size, 1)
        return np.where(self.size > 1, 2 * (share * num_bytes / self.bytes_per_s + self.tree_s), 0.0)


def tp_group(c: Columns, f: Factors) -> Group:
    return _group(c, f, c.tp, np.ones(len(c)))


def dp_group(c: Columns, f: Factors, size: Column) -> Group:
    return _group(c, f, size, c.tp)


def copies_group(c: Columns, f: Factors) -> Group:
    """Ranks that hold the same shard."""
    return _group(c, f, np.maximum(c.dp / c.shard, 1.0), c.tp * c.shard)


def _group(c: Columns, f: Factors, size: Column, stride: Column) -> Group:
    local = _in_a_node(c, size, stride)
    link = c.link_Bps * f["link_share"]
    nic = c.nic_Bps * nic_share(c, f) * np.minimum(local * stride, c.node) / c.node / np.minimum(stride, c.node)
    nodes = np.ceil(size / local)
    inside = f["link_latency_s"] + 1e-6 * local
    between = nodes > 1
    # because: large groups change from rings to trees, whose depth is a logarithm
    ring = f["hop_latency_s"] * (nodes - 1) + f["step_latency_s"] * (size - nodes)
    tree = np.minimum(ring, 12 * f["hop_latency_s"] * np.log2(np.maximum(nodes, 2)))
    speed = np.where(between, np.minimum(link, nic), link)
    return Group(size, local, speed, inside + np.where(between, ring, 0.0), inside + np.where(between, tree, 0.0))


def _in_a_node(c: Columns, size: Column, stride: Column) -> Column:
    """How many ranks of a group are in a node, at the least: one that lies across two nodes may have few in one.

    A run is spread evenly over as few nodes as it needs: 128 devices are 64 in each of two racks of 72. A group that is
    all of the run has all that a node holds: of 15 devices on nodes of 8 at least 7.
    """
    devices = c.pp * c.dp * c.tp
    filled = np.floor(devices / np.ceil(devices / c.node))
    span = np.rint(size * stride)
    together = np.where(span >= devices, filled, np.gcd(filled.astype(np.int64), span.astype(np.int64)))
    found: Column = np.clip(np.floor(together / stride), 1, size)
    return found


def nic_share(c: Columns, f: Factors) -> Column:
    return f.by_kind(("nic_share", "nic_share_other", "nic_share_omnipath"), c.network)


def send(c: Columns, f: Factors, num_bytes: Column) -> Column:
    """One boundary of a pipeline, all tp ranks at once, to the neighbour stage.

    A rank has two, before and behind it. Where several stages share a node, that of its first and last are one inside
    and one between nodes, and these set the pace.
    """
    stage = c.tp * c.dp
    outside = np.where(stage * c.pp <= c.node, 0.0, np.where(stage * 2 <= c.node, 0.5, 1.0))
    nic = c.nic_Bps / c.node * nic_share(c, f)
    inside_s = num_bytes / (c.link_Bps * f["link_share"]) + f["link_latency_s"]
    return inside_s + outside * (num_bytes / nic + 2 * f["hop_latency_s"] - inside_s)
