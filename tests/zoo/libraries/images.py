"""timm, torchvision, vit-pytorch and open_clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.zoo.libraries.row import Make, Part, Row, below, by_name, each, exactly, normal, ones, part, same, uniform


def timm(name: str, size: int, **config: Any) -> Row:
    made = part("timm.create_model", name, num_classes=7, **config)
    return Row("timm", name, made, {"x": normal(2, 3, size, size)})


def vision(path: str, inputs: Mapping[str, Make], *args: Any, called: str = "", **config: Any) -> Row:
    return Row("torchvision", called or path.rpartition(".")[2], Part(f"torchvision.models.{path}", config, args), inputs)


def classifier(name: str, size: int = 32, **config: Any) -> Row:
    return vision(name, {"x": normal(2, 3, size, size)}, weights=None, num_classes=7, **config)


def detector(name: str, **config: Any) -> Row:
    """In training, with boxes; its losses are what it gives."""
    boxes = by_name(boxes=exactly([[2.0, 2.0, 20.0, 20.0]]), labels=exactly([1]), masks=ones(1, 32, 32))
    inputs = {"images": each(uniform(3, 32, 32), uniform(3, 32, 32)), "targets": each(boxes, boxes)}
    return vision(f"detection.{name}", inputs, weights=None, weights_backbone=None, num_classes=3, min_size=32, max_size=32, **config)


def vit(path: str, *args: Any, inputs: Mapping[str, Make] | None = None, called: str = "", **config: Any) -> Row:
    """Of vit-pytorch; its plain options are those that most of its classes share."""
    made = Part(f"vit_pytorch.{path}", config, args)
    return Row("vit_pytorch", called or path, made, inputs or {"img": normal(2, 3, 32, 32)})


def clip(called: str, image: dict[str, Any], text: dict[str, Any], name: str = "CLIP", **config: Any) -> Row:
    made = Part(f"open_clip.model.{name}", {"embed_dim": 16, "vision_cfg": image, "text_cfg": text, **config})
    return Row("open_clip", called, made, {"image": normal(4, 3, 32, 32), "text": below(65, 4, 12)})


PLAIN: Final[dict[str, Any]] = dict(num_classes=7, dim=32, depth=2, heads=4, mlp_dim=64, dim_head=8)
SQUARE: Final[dict[str, Any]] = dict(image_size=32, patch_size=8, **PLAIN)
FILM: Final[dict[str, Any]] = dict(frames=4, frame_patch_size=2)
VIDEO: Final = normal(2, 3, 4, 32, 32)
VIT: Final = part("vit_pytorch.ViT", **SQUARE)
NEXT: Final = part("tests.zoo.libraries.row.found_at", "torchvision.models.swin_transformer.SwinTransformerBlockV2")
IMAGE: Final[dict[str, Any]] = dict(image_size=32, patch_size=8, width=32, layers=2, head_width=8)
TEXT: Final[dict[str, Any]] = dict(context_length=12, vocab_size=65, width=32, heads=4, layers=2)

ROWS: Final = (
    timm("botnet26t_256", 32, img_size=32), timm("lambda_resnet26t", 32, img_size=32),
    timm("test_byobnet", 32, img_size=32), timm("cait_xxs24_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4),
    timm("coat_tiny", 32, img_size=32, serial_depths=(1, 1, 1, 1)),
    timm("coat_lite_tiny", 32, img_size=32, serial_depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64)),
    timm("convit_tiny", 32, img_size=32, depth=2, embed_dim=32, num_heads=4), timm("convmixer_768_32", 32),
    timm("test_convnext", 32, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)), timm("test_convnext2", 32, dims=(16, 32, 48, 64)),
    timm("cpubone_nano", 32), timm("crossvit_tiny_240", 32), timm("csatv2", 64, depths=(2, 2, 2, 2), dims=(16, 32, 48, 64)),
    timm("cs3darknet_focus_s", 32), timm("cspresnet50", 64), timm("cspnext_tiny", 64),
    timm("davit_tiny", 32, depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4)),
    timm("deit_tiny_patch16_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4),
    timm("deit_tiny_distilled_patch16_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4),
    timm("deit3_small_patch16_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4), timm("densenet121", 32, block_config=(2, 2)),
    timm("dla46x_c", 32), timm("dpn48b", 32), timm("edgenext_xx_small", 32, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)),
    timm("efficientformer_l1", 224, img_size=224, depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64)),
    timm("efficientformerv2_s0", 32, img_size=32, depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64)), timm("test_efficientnet", 32),
    timm("test_efficientnet_gn", 32), timm("efficientvim_m1", 32, depths=(1, 1, 1), embed_dim=(16, 32, 48)),
    timm("efficientvit_b0", 32, depths=(1, 1, 1, 1)), timm("efficientvit_m0", 32, img_size=32, embed_dim=(16, 32, 48)),
    timm("eva02_tiny_patch14_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4),
    timm("fasternet_t0", 32, depths=(1, 1, 1, 1), embed_dim=32), timm("fastvit_t8", 32, layers=(1, 1, 1, 1)),
    timm("focalnet_tiny_srf", 32), timm("gcvit_xxtiny", 32, img_size=32, embed_dim=32), timm("ghostnet_050", 32),
    timm("ghostnetv2_100", 64), timm("hardcorenas_b", 64), timm("hgnetv2_b0", 64),
    timm("hiera_tiny_224", 32, img_size=32, embed_dim=32, num_heads=4), timm("sam2_hiera_tiny", 32, embed_dim=32, num_heads=4),
    timm("hrnet_w18_small", 64), timm("iformer_t", 32, dims=(16, 32, 48, 64)),
    timm("inception_next_atto", 32, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)), timm("inception_v3", 139, norm_eps=0.1),
    timm("lcnetv2_small", 32, depths=(1, 1, 1, 1)), timm("levit_128s", 32, img_size=32, embed_dim=(16, 32, 48)), timm("lowformer_b0", 32),
    timm("test_mambaout", 32, depths=(1, 1, 1, 1)), timm("coatnet_pico_rw_224", 32, img_size=32, depths=(1, 1, 1, 1)),
    timm("maxvit_pico_rw_256", 32, img_size=32, depths=(1, 1, 1, 1)), timm("poolformerv2_s12", 32), timm("caformer_s18", 32),
    timm("gmlp_ti16_224", 32, img_size=32), timm("mixer_s32_224", 32, img_size=32), timm("resmlp_12_224", 32, img_size=32),
    timm("lcnet_035", 32), timm("mobilenetv3_small_050", 32), timm("mobilevit_xxs", 32, img_size=32),
    timm("mobilevitv2_050", 32, img_size=32), timm("mvitv2_tiny", 32, img_size=32), timm("jx_nest_tiny", 32, img_size=32),
    timm("nextvit_small", 32), timm("test_nfnet", 32, depths=(1, 1, 1)), timm("pit_ti_224", 32, img_size=32),
    timm("pvt_v2_b0", 32, depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4)), timm("rdnet_tiny", 32),
    timm("regnetx_002", 32), timm("regnety_002", 32), timm("repghostnet_050", 32),
    timm("repvit_m0_9", 32, img_size=32, embed_dim=(16, 32, 48, 64)), timm("res2net50_14w_8s", 32, layers=(1, 1, 1, 1)),
    timm("resnest14d", 32), timm("test_resnet", 32), timm("resnetv2_18", 32, layers=(1, 1, 1, 1)),
    timm("resnetv2_50", 32, layers=(1, 1, 1, 1)), timm("rexnet_100", 64), timm("selecsls42", 96),
    timm("legacy_seresnet18", 32, layers=(1, 1, 1, 1)),
    timm("sequencer2d_s", 32, img_size=32, layers=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64)), timm("shvit_s1", 32),
    timm("skresnet18", 32, layers=(1, 1, 1, 1)), timm("starnet_s050", 32, depths=(1, 1, 1, 1)),
    timm("swiftformer_xs", 32, img_size=32, layers=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64)),
    timm("swin_tiny_patch4_window7_224", 32, img_size=32, depths=(1, 1, 1, 1), embed_dim=32),
    timm("swinv2_tiny_window8_256", 32, img_size=32, depths=(1, 1, 1, 1)),
    timm("swinv2_cr_tiny_224", 32, img_size=32, depths=(1, 1, 1, 1)),
    timm("tiny_vit_5m_224", 32, depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4)),
    timm("tnt_s_patch16_224", 32, img_size=32, depth=2), timm("tresnet_m", 32, layers=(1, 1, 1, 1)),
    timm("twins_svt_small", 32, img_size=32, depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4)),
    timm("twins_pcpvt_small", 32, img_size=32, depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4)),
    timm("visformer_tiny", 32, img_size=32, depth=2, embed_dim=32, num_heads=4),
    timm("test_vit", 32, img_size=32, depth=2, embed_dim=32, num_heads=4),
    timm("test_vit2", 32, img_size=32, depth=2, embed_dim=32, num_heads=4),
    timm("vit_tiny_r_s16_p8_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4),
    timm("test_vit_relpos", 32, img_size=32, depth=2, embed_dim=32, num_heads=4), timm("vitamin_small_224", 32, img_size=32, depth=2),
    timm("volo_d1_224", 32, img_size=32), timm("ese_vovnet19b_slim_dw", 32), timm("legacy_xception", 32), timm("xception41p", 32),
    timm("xcit_nano_12_p8_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4), timm("nf_regnet_b0", 32, depths=(1, 1, 1, 1)),
    timm("ecaresnet26t", 32, layers=(1, 1, 1, 1)), timm("seresnext26d_32x4d", 32, layers=(1, 1, 1, 1)),
    timm("mobilenetv4_conv_small_035", 32), timm("tinynet_e", 64),
    timm("edgenext_x_small", 32, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)),
    timm("repvgg_a0", 32, img_size=32), timm("gernet_s", 32, img_size=32),
    timm("beit_base_patch16_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4),
    timm("samvit_base_patch16_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4, global_attn_indexes=(1,)),
    timm("naflexvit_base_patch16_siglip", 32, depth=2, embed_dim=32, num_heads=4),
    classifier("resnet18"), classifier("densenet121", 64),
    classifier("squeezenet1_1"), classifier("squeezenet1_0", 64),
    classifier("mobilenet_v2", 64), classifier("mobilenet_v3_small"), classifier("mnasnet0_5", 64), classifier("shufflenet_v2_x0_5"),
    classifier("efficientnet_b0", 64), classifier("regnet_y_400mf", 64),
    vision("swin_transformer.SwinTransformer", {"x": normal(2, 3, 32, 32)}, [4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=7),
    vision("swin_transformer.SwinTransformer", {"x": normal(2, 3, 32, 32)}, [4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=7,
           block=NEXT, called="SwinTransformer v2"),
    vision("VisionTransformer", {"x": normal(2, 3, 32, 32)}, 32, 8, 2, 4, 32, 64, num_classes=7),
    vision("maxvit.MaxVit", {"x": normal(2, 3, 32, 32)}, (32, 32), 8, 4, [8, 16], [1, 1], 8, 0.1, num_classes=7),
    vision("segmentation.fcn_resnet50", {"x": normal(2, 3, 32, 32)}, weights_backbone=None, num_classes=3),
    vision("segmentation.deeplabv3_mobilenet_v3_large", {"x": normal(2, 3, 32, 32)}, weights_backbone=None, num_classes=3, aux_loss=True),
    vision("segmentation.lraspp_mobilenet_v3_large", {"input": normal(2, 3, 32, 32)}, weights_backbone=None, num_classes=3),
    vision("video.mc3_18", {"x": normal(2, 3, 4, 16, 16)}, num_classes=7),
    vision("video.S3D", {"x": normal(2, 3, 16, 224, 224)}, num_classes=7),
    vision("video.swin_transformer.SwinTransformer3d", {"x": VIDEO}, [2, 4, 4], 16, [2, 2], [2, 4], [2, 4, 4], num_classes=7),
    vision("optical_flow.raft_small", {"image1": uniform(2, 3, 128, 128), "image2": uniform(2, 3, 128, 128), "num_flow_updates": same(2)}),
    detector("retinanet_resnet50_fpn"), detector("fcos_resnet50_fpn"),
    vision("quantization.resnet18", {"x": normal(2, 3, 32, 32)}, num_classes=7, quantize=False, called="quantizable resnet18"),
    vit("ViT", **SQUARE), vit("SimpleViT", **SQUARE), vit("cait.CaiT", **SQUARE, cls_depth=1, layer_dropout=0.05),
    vit("deepvit.DeepViT", **SQUARE), vit("rvt.RvT", **SQUARE), vit("ats_vit.ViT", **SQUARE,
        max_tokens_per_depth=(8, 6)),
    vit("vit_for_small_dataset.ViT", **SQUARE), vit("parallel_vit.ViT", **SQUARE),
    vit("vit_with_patch_merger.ViT", **SQUARE, patch_merge_layer=1),
    vit("simple_uvit.SimpleUViT", **SQUARE), vit("simple_vit_with_register_tokens.SimpleViT", **SQUARE),
    vit("jumbo_vit.JumboViT", **SQUARE, jumbo_cls_k=2),
    vit("normalized_vit.nViT", **SQUARE, inputs={"images": normal(2, 3, 32, 32)}), vit("xcit.XCiT", **SQUARE, cls_depth=1),
    vit("simple_vit_with_fft.SimpleViT", **SQUARE, freq_patch_size=8), vit("simple_vit_with_qk_norm.SimpleViT", **SQUARE),
    vit("simple_vit_with_value_residual.SimpleViT", **SQUARE), vit("simple_vit_with_hyper_connections.SimpleViT", **SQUARE,
        num_residual_streams=2),
    vit("vit_with_patch_dropout.ViT", **SQUARE), vit("vit_5.ViT", **SQUARE), vit("jet_vit.JetViT", **SQUARE),
    vit("vit_with_decorr.ViT", **SQUARE),
    vit("nest.NesT", image_size=32, patch_size=4, num_classes=7, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1), dim_head=8),
    vit("pit.PiT", image_size=32, patch_size=8, num_classes=7, dim=32, depth=(1, 1), heads=4, mlp_dim=64, dim_head=8),
    vit("t2t.T2TViT", image_size=32, num_classes=7, dim=32, depth=2, heads=4, mlp_dim=64, dim_head=8, t2t_layers=((7, 4), (3, 2))),
    vit("levit.LeViT", image_size=32, num_classes=7, dim=(16, 32), depth=1, heads=(2, 4), mlp_mult=2, stages=2, dim_key=8, dim_value=8),
    vit("cvt.CvT", inputs={"x": normal(2, 3, 32, 32)}, num_classes=7, s1_emb_dim=8, s2_emb_dim=16, s2_heads=2, s2_depth=1, s3_emb_dim=32,
        s3_heads=4, s3_depth=1),
    vit("cct.CCT", inputs={"x": normal(2, 3, 32, 32)}, img_size=32, embedding_dim=32, num_layers=2, num_heads=4, mlp_ratio=2.0,
        num_classes=7),
    vit("cct_3d.CCT", inputs={"x": VIDEO}, img_size=32, num_frames=4, embedding_dim=32, num_layers=2, num_heads=4, mlp_ratio=2.0,
        num_classes=7),
    vit("crossformer.CrossFormer", inputs={"x": normal(2, 3, 64, 64)}, dim=(32, 32, 32, 32), depth=(1, 1, 1, 1),
    global_window_size=(4, 2, 2, 1),
        local_window_size=2, num_classes=7),
    vit("cross_vit.CrossViT", image_size=32, num_classes=7, sm_dim=16, lg_dim=32, sm_patch_size=8, sm_enc_mlp_dim=32, sm_enc_heads=2,
        lg_patch_size=16, lg_enc_depth=1, lg_enc_heads=2, lg_enc_mlp_dim=32, cross_attn_heads=2, depth=1),
    vit("max_vit.MaxViT", inputs={"x": normal(2, 3, 32, 32)}, num_classes=7, dim=16, depth=(1, 1), dim_head=8, window_size=4),
    vit("mobile_vit.MobileViT", inputs={"x": normal(2, 3, 64, 64)}, image_size=(64, 64), dims=[16, 24, 32], depths=(1, 1, 1),
        channels=[8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 48], num_classes=7),
    vit("regionvit.RegionViT", inputs={"x": normal(2, 3, 56, 56)}, dim=(8, 16, 32, 32), depth=(1, 1, 1, 1), window_size=7, num_classes=7),
    vit("scalable_vit.ScalableViT", inputs={"img": normal(2, 3, 64, 64)}, num_classes=7, dim=16, heads=(2, 2, 2, 2), depth=(1, 1, 1, 1),
        reduction_factor=(8, 4, 2, 1), window_size=(8, 8, None, None)),
    vit("sep_vit.SepViT", inputs={"x": normal(2, 3, 224, 224)}, num_classes=7, dim=16, dim_head=8, heads=(1, 2, 2, 2), depth=(1, 1, 1, 1),
        window_size=7),
    vit("twins_svt.TwinsSVT", inputs={"x": normal(2, 3, 64, 64)}, num_classes=7, s1_emb_dim=8, s1_local_patch_size=4, s1_global_k=4,
        s2_emb_dim=16,
        s2_local_patch_size=4, s2_global_k=4, s3_emb_dim=16, s3_local_patch_size=4, s3_global_k=4, s3_depth=1, s4_emb_dim=32,
        s4_local_patch_size=2, s4_global_k=2, s4_depth=1),
    vit("vivit.ViViT", inputs={"video": VIDEO}, image_size=32, image_patch_size=8, num_classes=7, dim=32, spatial_depth=1, temporal_depth=1,
        heads=4, mlp_dim=64, dim_head=8, **FILM),
    vit("vit_3d.ViT", inputs={"video": VIDEO}, image_size=32, image_patch_size=8, **PLAIN, **FILM),
    vit("vit_1d.ViT", inputs={"series": normal(2, 3, 32)}, seq_len=32, patch_size=8, **PLAIN),
    vit("look_vit.LookViT", dim=32, image_size=32, num_classes=7, depth=1, patch_size=16, highres_patch_size=8, heads=4, dim_head=8,
        cross_attn_heads=4, cross_attn_dim_head=8),
    vit("na_vit.NaViT", inputs={"batched_images": each(normal(3, 32, 32), normal(3, 16, 32))}, **SQUARE, called="NaViT"),
    clip("CLIP", IMAGE, TEXT), clip("CLIP of a ResNet", dict(image_size=32, layers=[1, 1, 1, 1], width=8), TEXT),
    clip("CLIP with pooled attention", {**IMAGE, "attentional_pool": True, "attn_pooler_queries": 4, "attn_pooler_heads": 4}, TEXT),
    clip("CLIP with dropped patches", {**IMAGE, "patch_dropout": 0.5}, TEXT),
    clip("CLIP over timm", dict(timm_model_name="test_vit", timm_pool="", timm_proj="linear", image_size=32), TEXT),
    clip("CustomTextCLIP", IMAGE, TEXT, "CustomTextCLIP"),
)  # fmt: skip
