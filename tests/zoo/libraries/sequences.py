"""torchaudio, litgpt and x-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.zoo.libraries.row import Make, Part, Row, below, exactly, normal, part


def audio(name: str, inputs: Mapping[str, Make], *args: Any, called: str = "", **config: Any) -> Row:
    return Row("torchaudio", called or name, Part(f"torchaudio.models.{name}", config, args), inputs)


def gpt(name: str, **config: Any) -> Row:
    """By the name of one of litgpt's configurations, with its sizes made small."""
    small: dict[str, Any] = dict(n_layer=2, n_embd=32, n_head=4, intermediate_size=64, vocab_size=65, padded_vocab_size=72, block_size=16)
    made = part("litgpt.config.Config.from_name", name, **{**small, **config})
    return Row("litgpt", name, part("litgpt.GPT", made), {"idx": below(65, 4, 12)})


def layers(kind: str = "Decoder", **config: Any) -> Part:
    return Part(f"x_transformers.{kind}", {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8, **config})


def language(name: str, **config: Any) -> Row:
    """A decoder over tokens with its attention layers' option."""
    made = part("x_transformers.TransformerWrapper", num_tokens=65, max_seq_len=16, attn_layers=layers(**config))
    return Row("x_transformers", name, made, {"x": below(65, 4, 12)})


def wrapped(name: str, model: Part, inputs: Mapping[str, Make]) -> Row:
    return Row("x_transformers", name, model, inputs)


TOKENS: Final = part("x_transformers.TransformerWrapper", num_tokens=65, max_seq_len=16, attn_layers=layers())
WAVE2VEC: Final[dict[str, Any]] = dict(
    extractor_mode="group_norm", extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)], extractor_conv_bias=False, encoder_embed_dim=32,
    encoder_projection_dropout=0.0, encoder_pos_conv_kernel=4, encoder_pos_conv_groups=2, encoder_num_layers=2, encoder_num_heads=4,
    encoder_attention_dropout=0.0, encoder_ff_interm_features=64, encoder_ff_interm_dropout=0.0, encoder_dropout=0.0,
    encoder_layer_norm_first=False, encoder_layer_drop=0.0, aux_num_out=7,
)  # fmt: skip

ROWS: Final = (
    audio("Conformer", {"input": normal(4, 12, 16), "lengths": exactly([12, 12, 9, 7])}, 16, 4, 32, 2, 3),
    audio("Conformer", {"input": normal(4, 12, 16), "lengths": exactly([12, 12, 12, 12])}, 16, 4, 32, 1, 3, use_group_norm=True,
          convolution_first=True, called="Conformer with group norm"),
    audio("ConvTasNet", {"input": normal(4, 1, 160)}, enc_num_feats=16, msk_num_feats=8, msk_num_hidden_feats=16, msk_num_layers=2,
          msk_num_stacks=1),
    audio("DeepSpeech", {"x": normal(4, 1, 12, 16)}, 16, 32, 7),
    audio("Emformer", {"input": normal(4, 10, 16), "lengths": exactly([8, 8, 8, 8])}, 16, 4, 32, 2, 4, right_context_length=2),
    audio("rnnt.emformer_rnnt_model", {"sources": normal(2, 10, 16), "source_lengths": exactly([8, 8]), "targets": below(9, 2, 3),
          "target_lengths": exactly([3, 3])}, called="RNNT", input_dim=16, encoding_dim=16, num_symbols=9, segment_length=4,
          right_context_length=2, time_reduction_input_dim=8, time_reduction_stride=2, transformer_num_heads=2, transformer_ffn_dim=32,
          transformer_num_layers=1, transformer_dropout=0.0, transformer_activation="gelu", transformer_left_context_length=4,
          transformer_max_memory_size=0, transformer_weight_init_scale_strategy="depthwise", transformer_tanh_on_mem=True,
          symbol_embedding_dim=16, num_lstm_layers=1, lstm_layer_norm=True, lstm_layer_norm_epsilon=1e-3, lstm_dropout=0.0),
    audio("Tacotron2", {"tokens": below(20, 2, 8), "token_lengths": exactly([8, 6]), "mel_specgram": normal(2, 8, 6),
          "mel_specgram_lengths": exactly([6, 5])}, n_mels=8, n_symbol=20, symbol_embedding_dim=16, encoder_embedding_dim=16,
          encoder_n_convolution=1, decoder_rnn_dim=16, prenet_dim=16, attention_rnn_dim=16, attention_hidden_dim=8,
          attention_location_n_filter=4, attention_location_kernel_size=3, postnet_n_convolution=2, postnet_embedding_dim=16),
    audio("Wav2Letter", {"x": normal(2, 1, 1600)}, num_classes=7),
    audio("wav2vec2_model", {"waveforms": normal(2, 400)}, **WAVE2VEC),
    audio("wav2vec2_model", {"waveforms": normal(2, 400), "lengths": exactly([400, 320])}, **WAVE2VEC,
          called="wav2vec2_model with lengths"),
    audio("WaveRNN", {"waveform": normal(2, 1, 32), "specgram": normal(2, 1, 8, 6)}, upsample_scales=[2, 2, 2], n_classes=8, hop_length=8,
          n_res_block=1, n_rnn=16, n_fc=16, kernel_size=3, n_freq=8, n_hidden=16, n_output=16),
    audio("squim_objective_base", {"x": normal(2, 800)}),
    gpt("pythia-14m"), gpt("Llama-3.2-1B", n_query_groups=2), gpt("Mixtral-8x7B-v0.1", n_query_groups=2, n_expert=4),
    gpt("phi-1_5"), gpt("Gemma-2b", n_query_groups=1, head_size=8), gpt("Gemma-2-2b", n_query_groups=2, head_size=8),
    gpt("Gemma-3-1b-it", n_query_groups=1, head_size=8), gpt("falcon-7b", n_query_groups=1), gpt("Qwen2.5-0.5B", n_query_groups=2),
    gpt("Qwen3-0.6B", n_query_groups=2, head_size=8), gpt("Qwen3-30B-A3B", n_query_groups=2, head_size=8, n_expert=4, n_expert_per_token=2,
    moe_intermediate_size=16), gpt("OLMo-1B-hf"), gpt("OLMo-2-1124-7B", n_query_groups=4), gpt("stablelm-3b-4e1t"),
    gpt("SmolLM2-135M", n_query_groups=2), gpt("TinyLlama-1.1B-Chat-v1.0", n_query_groups=2),
    language("decoder"), language("rotary", rotary_pos_emb=True), language("alibi", alibi_pos_bias=True, alibi_num_heads=2),
    language("relative positions", rel_pos_bias=True), language("dynamic positions", dynamic_pos_bias=True),
    language("rms norm and swiglu", use_rmsnorm=True, ff_swish=True, ff_glu=True), language("one key and value", attn_one_kv_head=True),
    language("grouped queries", attn_kv_heads=2), language("qk norm", attn_qk_norm=True),
        language("talking heads", attn_pre_talking_heads=True),
    language("memory of keys", attn_num_mem_kv=4), language("sandwich", sandwich_norm=True), language("macaron", macaron=True),
    language("gated residual", gate_residual=True), language("residual attention", residual_attn=True),
        language("shifted tokens", shift_tokens=1),
    language("flash", attn_flash=True), language("sparse top k", attn_sparse_topk=4), language("hyper-connections", num_residual_streams=2),
    language("value residual", add_value_residual=True), language("layer drop", layer_dropout=0.1),
    language("differential", attn_qk_norm=True, rotary_xpos=True),
    wrapped("autoregressive", part("x_transformers.AutoregressiveWrapper", TOKENS), {"x": below(65, 4, 13)}),
    wrapped("encoder and decoder", part("x_transformers.XTransformer", dim=32, enc_num_tokens=65, enc_depth=1, enc_heads=4,
        enc_max_seq_len=16,
            dec_num_tokens=65, dec_depth=1, dec_heads=4, dec_max_seq_len=16), {"src": below(65, 4, 12), "tgt": below(65, 4, 12)}),
    wrapped("vision", part("x_transformers.ViTransformerWrapper", image_size=16, patch_size=4, num_classes=7,
        attn_layers=layers("Encoder")),
            {"img": normal(4, 3, 16, 16)}),
    wrapped("continuous", part("x_transformers.ContinuousTransformerWrapper", dim_in=8, dim_out=8, max_seq_len=16, attn_layers=layers()),
            {"x": normal(4, 12, 8)}),
    wrapped("continuous autoregressive", part("x_transformers.ContinuousAutoregressiveWrapper",
        part("x_transformers.ContinuousTransformerWrapper",
            dim_in=8, dim_out=8, max_seq_len=16, attn_layers=layers())), {"x": normal(4, 12, 8)}),
    wrapped("belief state", part("x_transformers.BeliefStateWrapper", TOKENS, TOKENS), {"seq": below(65, 4, 12)}),
    wrapped("neo mlp", part("x_transformers.NeoMLP", dim_in=5, dim_hidden=4, dim_out=2, depth=2, dim_model=32), {"x": normal(4, 5)}),
)  # fmt: skip
