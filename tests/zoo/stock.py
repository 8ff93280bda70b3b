"""The stock `transformers` families of the zoo."""

from __future__ import annotations

from typing import Final

from tests.zoo.families import (
    BART_LIKE,
    BERT_LIKE,
    EXPERTS,
    GPT_LIKE,
    IMAGE_TOWER,
    LLAMA_LIKE,
    ROTARY,
    T5_LIKE,
    TEXT_TOWER,
    VIT_LIKE,
    VOCAB,
    Stock,
    captions,
    causal,
    masked,
    pictures,
    spectrogram,
    translated,
    waves,
)

STOCK: Final[dict[str, Stock]] = {
    "llama": Stock("LlamaConfig", "LlamaForCausalLM", LLAMA_LIKE, causal),
    "gpt2": Stock("GPT2Config", "GPT2LMHeadModel", GPT_LIKE, causal),
    "gpt_neox": Stock("GPTNeoXConfig", "GPTNeoXForCausalLM", LLAMA_LIKE, causal),
    "bert": Stock("BertConfig", "BertForMaskedLM", BERT_LIKE, masked),
    "roberta": Stock("RobertaConfig", "RobertaForMaskedLM", BERT_LIKE, masked),
    "t5": Stock("T5Config", "T5ForConditionalGeneration", T5_LIKE, translated),
    "vit": Stock("ViTConfig", "ViTForImageClassification", VIT_LIKE, pictures),
    "swin": Stock(
        "SwinConfig", "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 7},
        pictures,
    ),
    "convnext": Stock(
        "ConvNextConfig", "ConvNextForImageClassification",
        {"image_size": 32, "hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2, "num_labels": 7}, pictures,
    ),
    "whisper": Stock(
        "WhisperConfig", "WhisperForConditionalGeneration",
        {**BART_LIKE, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}, spectrogram,
    ),
    "mistral": Stock("MistralConfig", "MistralForCausalLM", {**LLAMA_LIKE, "sliding_window": 4}, causal),
    "qwen2": Stock("Qwen2Config", "Qwen2ForCausalLM", LLAMA_LIKE, causal),
    "mixtral": Stock("MixtralConfig", "MixtralForCausalLM", {**LLAMA_LIKE, **EXPERTS, "output_router_logits": True}, causal),
    "clip": Stock(
        "CLIPConfig", "CLIPModel",
        {"text_config": {**TEXT_TOWER, "projection_dim": 32}, "vision_config": IMAGE_TOWER, "projection_dim": 32}, captions,
    ),
    "mamba": Stock(
        "MambaConfig", "MambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4, "pad_token_id": 0}, causal,
    ),
    "phi": Stock("PhiConfig", "PhiForCausalLM", LLAMA_LIKE, causal),
    "phi3": Stock("Phi3Config", "Phi3ForCausalLM", LLAMA_LIKE, causal),
    "gemma": Stock("GemmaConfig", "GemmaForCausalLM", {**LLAMA_LIKE, "head_dim": 8}, causal),
    "gemma2": Stock("Gemma2Config", "Gemma2ForCausalLM", {**LLAMA_LIKE, "head_dim": 8, "sliding_window": 4}, causal),
    "gemma3": Stock("Gemma3TextConfig", "Gemma3ForCausalLM", {**LLAMA_LIKE, "head_dim": 8, "sliding_window": 4}, causal),
    "opt": Stock(
        "OPTConfig", "OPTForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 72, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32,
         "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, causal,
    ),
    "gpt_neo": Stock(
        "GPTNeoConfig", "GPTNeoForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 72, "num_layers": 2, "num_heads": 4, "window_size": 4,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}, causal,
    ),
    "gptj": Stock("GPTJConfig", "GPTJForCausalLM", {**GPT_LIKE, "rotary_dim": 4}, causal),
    "codegen": Stock("CodeGenConfig", "CodeGenForCausalLM", {**GPT_LIKE, "rotary_dim": 4, "n_ctx": 32}, causal),
    "gpt_bigcode": Stock("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT_LIKE, causal),
    "bloom": Stock("BloomConfig", "BloomForCausalLM", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, causal),
    "falcon": Stock("FalconConfig", "FalconForCausalLM", {**BERT_LIKE, "bos_token_id": 1, "eos_token_id": 2}, causal),
    "mpt": Stock(
        "MptConfig", "MptForCausalLM", {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32}, causal
    ),
    "stablelm": Stock("StableLmConfig", "StableLmForCausalLM", LLAMA_LIKE, causal),
    "starcoder2": Stock("Starcoder2Config", "Starcoder2ForCausalLM", LLAMA_LIKE, causal),
    "cohere": Stock("CohereConfig", "CohereForCausalLM", LLAMA_LIKE, causal),
    "granite": Stock("GraniteConfig", "GraniteForCausalLM", LLAMA_LIKE, causal),
    "qwen3": Stock("Qwen3Config", "Qwen3ForCausalLM", {**LLAMA_LIKE, "head_dim": 8}, causal),
    "qwen3_moe": Stock(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {**LLAMA_LIKE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, causal,
    ),
    "olmo": Stock("OlmoConfig", "OlmoForCausalLM", LLAMA_LIKE, causal),
    "olmo2": Stock("Olmo2Config", "Olmo2ForCausalLM", LLAMA_LIKE, causal),
    "glm": Stock("GlmConfig", "GlmForCausalLM", {**LLAMA_LIKE, "head_dim": 8}, causal),
    "smollm3": Stock("SmolLM3Config", "SmolLM3ForCausalLM", LLAMA_LIKE, causal),
    "gpt_oss": Stock(
        "GptOssConfig", "GptOssForCausalLM",
        {**LLAMA_LIKE, **EXPERTS, "head_dim": 8, "sliding_window": 4, "rope_parameters": ROTARY}, causal,
    ),
    "deepseek_v3": Stock(
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        {**LLAMA_LIKE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
         "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24,
         "first_k_dense_replace": 1}, causal,
    ),
    "distilbert": Stock(
        "DistilBertConfig", "DistilBertForMaskedLM",
        {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 72, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}, masked,
    ),
    "electra": Stock("ElectraConfig", "ElectraForMaskedLM", {**BERT_LIKE, "embedding_size": 16}, masked),
    "albert": Stock("AlbertConfig", "AlbertForMaskedLM", {**BERT_LIKE, "embedding_size": 16}, masked),
    "mpnet": Stock("MPNetConfig", "MPNetForMaskedLM", BERT_LIKE, masked),
    "deberta_v2": Stock(
        "DebertaV2Config", "DebertaV2ForMaskedLM", {**BERT_LIKE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, masked
    ),
    "modernbert": Stock("ModernBertConfig", "ModernBertForMaskedLM", {**BERT_LIKE, "local_attention": 4}, masked),
    "bart": Stock("BartConfig", "BartForConditionalGeneration", BART_LIKE, translated),
    "pegasus": Stock("PegasusConfig", "PegasusForConditionalGeneration", BART_LIKE, translated),
    "mbart": Stock("MBartConfig", "MBartForConditionalGeneration", BART_LIKE, translated),
    "deit": Stock("DeiTConfig", "DeiTForImageClassification", VIT_LIKE, pictures),
    "beit": Stock("BeitConfig", "BeitForImageClassification", VIT_LIKE, pictures),
    "dinov2": Stock("Dinov2Config", "Dinov2ForImageClassification", VIT_LIKE, pictures),
    "resnet_stock": Stock(
        "ResNetConfig", "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic", "num_labels": 7}, pictures,
    ),
    "siglip": Stock(
        "SiglipConfig", "SiglipModel", {"text_config": {**TEXT_TOWER, "projection_size": 32}, "vision_config": VIT_LIKE}, captions
    ),
    "wav2vec2": Stock(
        "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification",
        {**BERT_LIKE, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_conv_pos_embeddings": 8,
         "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "mask_time_prob": 0.0, "num_labels": 5, "layerdrop": 0.0}, waves,
    ),
}  # fmt: skip
