"""torch_geometric: its models, and its layers, over one small graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from tests.zoo.libraries.row import Make, Part, Row, below, exactly, normal, part, uniform

EDGES: Final[dict[str, Make]] = {"edge_index": below(8, 2, 24)}
NODES: Final[dict[str, Make]] = {"x": normal(8, 16), **EDGES}
WEIGHTED: Final[dict[str, Make]] = {**NODES, "edge_weight": uniform(24)}
DESCRIBED: Final[dict[str, Make]] = {**NODES, "edge_attr": normal(24, 4)}
TYPED: Final[dict[str, Make]] = {**NODES, "edge_type": below(3, 24)}


def model(name: str, inputs: Mapping[str, Make], *args: Any, **config: Any) -> Row:
    return Row("torch_geometric", name, Part(f"torch_geometric.nn.models.{name}", config, args), inputs)


def layer(name: str, inputs: Mapping[str, Make], *args: Any, called: str = "", **config: Any) -> Row:
    return Row("torch_geometric", called or name, Part(f"torch_geometric.nn.{name}", config, args), inputs)


def mlp(*widths: int) -> Part:
    return part("torch.nn.Sequential", part("torch.nn.Linear", *widths[:2]), part("torch.nn.ReLU"), part("torch.nn.Linear", *widths[1:]))


ROWS: Final = (
    model("MLP", {"x": normal(8, 16)}, [16, 32, 3]),
    model("GCN", NODES, 16, 32, 2, 3),
    model("GraphSAGE", NODES, 16, 32, 2, 3),
    model("GIN", NODES, 16, 32, 2, 3),
    model("GAT", NODES, 16, 32, 2, 3, heads=4),
    model("PNA", NODES, 16, 32, 2, 3, aggregators=["mean", "max", "std"], scalers=["identity", "attenuation"],
          deg=part("torch.tensor", [0, 2, 4, 2])),
    model("EdgeCNN", NODES, 16, 32, 2, 3),
    model("JumpingKnowledge", {"xs": lambda: [torch.randn(8, 16), torch.randn(8, 16)]}, "lstm", 16, 2),
    model("GraphUNet", NODES, 16, 32, 3, 2),
    model("LINKX", NODES, 8, 16, 32, 3, 2),
    model("LightGCN", EDGES, 8, 16, 2),
    model("AttentiveFP", {**DESCRIBED, "batch": exactly([0, 0, 0, 0, 1, 1, 1, 1])}, 16, 32, 3, 4, 2, 2),
    model("NeuralFingerprint", {**NODES, "batch": exactly([0, 0, 0, 0, 1, 1, 1, 1])}, 16, 32, 3, 2),
    model("PMLP", NODES, 16, 32, 3, 2),
    model("SGFormer", {**NODES, "batch": exactly([0, 0, 0, 0, 1, 1, 1, 1])}, 16, 32, 3),
    model("Polynormer", {**NODES, "batch": exactly([0, 0, 0, 0, 1, 1, 1, 1])}, 16, 32, 3),
    layer("GCNConv", NODES, 16, 8),
    layer("GCNConv", WEIGHTED, 16, 8, called="GCNConv with weights"),
    layer("GCNConv", NODES, 16, 8, called="GCNConv without self-loops", add_self_loops=False),
    layer("ChebConv", NODES, 16, 8, 3),
    layer("SAGEConv", NODES, 16, 8),
    layer("SAGEConv", NODES, 16, 8, called="SAGEConv of maxima", aggr="max"),
    layer("GraphConv", WEIGHTED, 16, 8),
    layer("GatedGraphConv", NODES, 16, 2),
    layer("ResGatedGraphConv", NODES, 16, 8),
    layer("GATConv", NODES, 16, 8, 2),
    layer("GATConv", NODES, 16, 8, 2, called="GATConv without self-loops", add_self_loops=False),
    layer("GATv2Conv", NODES, 16, 8, 2),
    layer("TransformerConv", DESCRIBED, 16, 8, 2, edge_dim=4),
    layer("AGNNConv", NODES),
    layer("TAGConv", NODES, 16, 8),
    layer("GINConv", NODES, mlp(16, 32, 8)),
    layer("GINEConv", {**NODES, "edge_attr": normal(24, 16)}, mlp(16, 32, 8)),
    layer("ARMAConv", NODES, 16, 8, 2),
    layer("SGConv", NODES, 16, 8, 2),
    layer("MFConv", NODES, 16, 8),
    layer("RGCNConv", TYPED, 16, 8, 3),
    layer("FastRGCNConv", TYPED, 16, 8, 3),
    layer("RGATConv", TYPED, 16, 8, 3),
    layer("SignedConv", {"x": normal(8, 16), "pos_edge_index": below(8, 2, 12), "neg_edge_index": below(8, 2, 12)}, 16, 8, True),
    layer("DNAConv", {"x": normal(8, 3, 16), **EDGES}, 16, 2),
    layer("PointNetConv", {"x": normal(8, 16), "pos": normal(8, 3), **EDGES}, mlp(19, 16, 8)),
    layer("GMMConv", {**NODES, "edge_attr": uniform(24, 2)}, 16, 8, 2, 3),
    layer("CGConv", DESCRIBED, 16, 4),
    layer("EdgeConv", NODES, mlp(32, 16, 8)),
    layer("NNConv", DESCRIBED, 16, 8, mlp(4, 8, 128)),
    layer("FeaStConv", NODES, 16, 8, 2),
    layer("HypergraphConv", {"x": normal(8, 16), "hyperedge_index": below(8, 2, 24)}, 16, 8),
    layer("LEConv", NODES, 16, 8),
    layer("PNAConv", NODES, 16, 8, ["mean", "max"], ["identity", "amplification"], part("torch.tensor", [0, 2, 4, 2])),
    layer("ClusterGCNConv", NODES, 16, 8),
    layer("GENConv", NODES, 16, 8),
    layer("GCN2Conv", {**NODES, "x_0": normal(8, 16)}, 16, 0.1),
    layer("FiLMConv", NODES, 16, 8),
    layer("SuperGATConv", NODES, 16, 8, 2),
    layer("FAConv", {**NODES, "x_0": normal(8, 16)}, 16),
    layer("EGConv", NODES, 16, 8),
    layer("PDNConv", DESCRIBED, 16, 8, 4, 8),
    layer("GeneralConv", NODES, 16, 8),
    layer("HEATConv", {**TYPED, "node_type": below(2, 8), "edge_attr": normal(24, 4)}, 16, 8, 2, 3, 4, 4, 4),
    layer("SSGConv", NODES, 16, 8, 0.1, 2),
    layer("AntiSymmetricConv", NODES, 16),
    layer("DirGNNConv", NODES, part("torch_geometric.nn.SAGEConv", 16, 8)),
    layer("MixHopConv", NODES, 16, 8),
    layer("GPSConv", NODES, 16, part("torch_geometric.nn.SAGEConv", 16, 16), 4),
)  # fmt: skip
