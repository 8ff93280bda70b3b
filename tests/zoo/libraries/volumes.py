"""monai: its networks, and its losses over the output of a small one."""

from __future__ import annotations

from typing import Any, Final

from tests.zoo.libraries.row import Make, Part, Row, below, normal, part, uniform

WIDTHS: Final = dict(channels=(8, 16), strides=(2, 2))
DIFFUSION: Final = dict(
    spatial_dims=2, in_channels=1, num_res_blocks=1, channels=(8, 16), attention_levels=(False, True),
        norm_num_groups=4, num_head_channels=8
)  # fmt: skip


def net(name: str, inputs: dict[str, Make], *args: Any, **config: Any) -> Row:
    return Row("monai", name, Part(f"monai.networks.nets.{name}", config, args), inputs)


def x(*shape: int, **more: Make) -> dict[str, Make]:
    return {"x": normal(*shape), **more}


def loss(name: str, target: Make, *, maps: int = 3, called: str = "target", **config: Any) -> Row:
    """Over a U-Net of as many maps, on pictures of 16 by 16."""
    model = part("monai.networks.nets.UNet", 2, 1, maps, (8, 16), (2,))
    return Row("monai", name, model, x(4, 1, 16, 16), Part(f"monai.losses.{name}", config), {called: target})


LABELS: Final = below(3, 4, 1, 16, 16)
SOFT: Final = dict(to_onehot_y=True, softmax=True)

ROWS: Final = (
    net("AttentionUnet", x(4, 1, 16, 16), 2, 1, 3, **WIDTHS),
    net("AutoEncoder", x(4, 1, 16, 16), 2, 1, 3, num_res_units=1, **WIDTHS),
    net("AutoencoderKL", x(4, 1, 16, 16), 2, channels=(8, 16), num_res_blocks=1, attention_levels=(False, True), norm_num_groups=4),
    net("BasicUNet", x(2, 1, 32, 32), 2, 1, 3, (8, 8, 8, 16, 16, 8)),
    net("BasicUNetPlusPlus", x(2, 1, 32, 32), 2, 1, 3, (8, 8, 8, 16, 16, 8)),
    net("Classifier", x(4, 1, 16, 16), (1, 16, 16), 3, (8, 16), (2, 2)),
    net("Critic", x(4, 1, 16, 16), (1, 16, 16), (8, 16), (2, 2)),
    net("Discriminator", x(4, 1, 16, 16), (1, 16, 16), (8, 16), (2, 2)),
    net("ControlNet", x(2, 1, 16, 16, timesteps=below(100, 2), controlnet_cond=normal(2, 1, 16, 16)), **DIFFUSION,
        conditioning_embedding_in_channels=1, conditioning_embedding_num_channels=(8,)),
    net("DenseNet", x(4, 1, 32, 32), 2, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2)),
    net("DiffusionModelUNet", x(2, 1, 16, 16, timesteps=below(100, 2)), **DIFFUSION, out_channels=1),
    net("DynUNet", x(4, 1, 32, 32), 2, 1, 3, (3, 3, 3), (1, 2, 2), (2, 2), filters=(8, 16, 16)),
    net("EfficientNetBN", {"inputs": normal(4, 1, 32, 32)}, "efficientnet-b0", pretrained=False, in_channels=1, num_classes=3),
    net("FlexibleUNet", {"inputs": normal(2, 1, 32, 32)}, 1, 3, "resnet10", decoder_channels=(16, 16, 8, 8, 8)),
    net("FullyConnectedNet", {"input": normal(4, 8)}, 8, 3, (16, 16)),
    net("VarFullyConnectedNet", x(4, 8), 8, 8, 4, (16,), (16,)),
    net("Generator", x(4, 8), (8,), (8, 4, 4), (8, 4, 1), (2, 2, 1)),
    net("HighResNet", x(2, 1, 16, 16), 2, 1, 3),
    net("MaskedAutoEncoderViT", x(4, 1, 16, 16), 1, 16, 4, 32, 64, 2, 4, decoder_hidden_size=32, decoder_mlp_dim=64, decoder_num_layers=1,
        decoder_num_heads=4, spatial_dims=2),
    net("MedNeXt", x(2, 1, 32, 32), 2, 8, 1, 3, kernel_size=3),
    net("MultiScalePatchDiscriminator", {"i": normal(4, 1, 64, 64)}, 2, 2, 2, 8, 1, minimum_size_im=64),
    net("PatchDiscriminator", x(4, 1, 32, 32), 2, 8, 1, num_layers_d=2),
    net("Quicknat", {"input": normal(2, 1, 32, 32)}, 3, 1, 8),
    net("Regressor", x(4, 1, 16, 16), (1, 16, 16), (2,), (8, 16), (2, 2)),
    net("GlobalNet", x(2, 1, 16, 16), [16, 16], 2, 1, 8, 2),
    net("LocalNet", x(2, 1, 16, 16), 2, 1, 8, (0, 1)),
    net("RegUNet", x(2, 1, 16, 16), 2, 1, 8, 2),
    net("ResNet", x(4, 1, 32, 32), "basic", [1, 1, 1, 1], [8, 8, 16, 16], spatial_dims=2, n_input_channels=1, num_classes=3),
    net("SegResNet", x(2, 1, 16, 16), 2, blocks_down=(1, 1), blocks_up=(1,)),
    net("SegResNetVAE", x(2, 1, 16, 16), (16, 16), spatial_dims=2, blocks_down=(1, 1), blocks_up=(1,), vae_nz=8),
    net("SegResNetDS", x(2, 1, 16, 16), 2, 8, blocks_down=(1, 1), dsdepth=2),
    net("SPADEAutoencoderKL", x(2, 1, 16, 16, seg=normal(2, 3, 16, 16)), 2, 3, channels=(8, 16), num_res_blocks=1,
        attention_levels=(False, True), norm_num_groups=4, spade_intermediate_channels=8),
    net("SPADEDiffusionModelUNet", x(2, 1, 16, 16, timesteps=below(100, 2), seg=normal(2, 3, 16, 16)), **DIFFUSION, out_channels=1,
        label_nc=3, spade_intermediate_channels=8),
    net("SPADENet", {"seg": normal(2, 3, 16, 16), "x": normal(2, 1, 16, 16)}, 2, 1, 1, 3, (16, 16), [8, 16], z_dim=8,
        spade_intermediate_channels=8),
    net("SwinUNETR", {"x_in": normal(2, 1, 64, 64)}, 1, 3, num_heads=(2, 2, 2, 2), depths=(1, 1, 1, 1), feature_size=12, spatial_dims=2),
    net("DecoderOnlyTransformer", {"x": below(65, 4, 12)}, 65, 12, 32, 2, 4),
    net("UNet", x(4, 1, 16, 16), 2, 1, 3, num_res_units=1, **WIDTHS),
    net("UNETR", {"x_in": normal(2, 1, 32, 32)}, 1, 3, 32, 4, 32, 64, 4, spatial_dims=2),
    net("VarAutoEncoder", x(4, 1, 16, 16), 2, (1, 16, 16), 1, 4, **WIDTHS),
    net("ViT", x(4, 1, 16, 16), 1, 16, 4, 32, 64, 2, 4, classification=True, spatial_dims=2),
    net("ViTAutoEnc", x(4, 1, 16, 16), 1, 16, 4, 1, 8, 32, 64, 2, 4, spatial_dims=2),
    net("VNet", x(2, 1, 32, 32), 2, dropout_dim=2),
    net("VoxelMorph", {"moving": normal(2, 1, 16, 16), "fixed": normal(2, 1, 16, 16)},
        part("monai.networks.nets.VoxelMorphUNet", 2, 2, 8, (8, 8, 8, 8), (8, 8)), spatial_dims=2),
    net("VQVAE", {"images": normal(2, 1, 16, 16)}, 2, 1, 1, (8, 16), 1, (8, 16),
        ((2, 4, 1, 1),) * 2, ((2, 4, 1, 1, 0),) * 2, num_embeddings=8,
        embedding_dim=8),
    loss("DiceLoss", LABELS, **SOFT),
    loss("DiceCELoss", LABELS, **SOFT),
    loss("DiceFocalLoss", LABELS, **SOFT),
    loss("GeneralizedDiceLoss", LABELS, **SOFT),
    loss("GeneralizedDiceFocalLoss", LABELS, **SOFT),
    loss("GeneralizedWassersteinDiceLoss", LABELS, dist_matrix=part("torch.tensor", [[0.0, 1.0, 1.0], [1.0, 0.0, 0.5], [1.0, 0.5, 0.0]])),
    loss("FocalLoss", LABELS, to_onehot_y=True),
    loss("TverskyLoss", LABELS, **SOFT),
    loss("MCCLoss", LABELS, **SOFT),
    loss("NACLLoss", below(3, 4, 16, 16), called="targets", classes=3, dim=2),
    loss("SoftclDiceLoss", uniform(4, 3, 16, 16)),
    loss("HausdorffDTLoss", LABELS, **SOFT),
    loss("LogHausdorffDTLoss", LABELS, **SOFT),
    loss("SSIMLoss", uniform(4, 1, 16, 16), maps=1, spatial_dims=2),
    loss("LocalNormalizedCrossCorrelationLoss", uniform(4, 1, 16, 16), maps=1, spatial_dims=2),
    loss("GlobalMutualInformationLoss", uniform(4, 1, 16, 16), maps=1),
    loss("JukeboxLoss", uniform(4, 1, 16, 16), maps=1, spatial_dims=2),
    loss("AsymmetricUnifiedFocalLoss", below(2, 4, 2, 16, 16), maps=2, called="y_true"),
    *(
        Row("monai", name, part("torch.nn.Linear", 8, 8), {"input": normal(4, 8)}, part(f"monai.losses.{name}"), {"target": normal(4, 8)})
        for name in ("BarlowTwinsLoss", "ContrastiveLoss")
    ),
    *(
        Row("monai", name, part("torch.nn.Conv2d", 1, 2, 3), {"input": normal(4, 1, 16, 16)}, part(f"monai.losses.{name}"))
        for name in ("BendingEnergyLoss", "DiffusionLoss")
    ),
)  # fmt: skip
