"""How diffusers and trainers name the layers that ComfyUI's models call otherwise, as data.

A row is ``(the model's name, the other name, part)``. ``*`` stands for a number, the same in both. Part says which rows
of the model's weight the other layer is: empty for all of them, otherwise a key of ``quant_core.lora.names.PARTS``.
A model has the names of at most one or two tables, so that no row needs to say which architecture it is for.
"""

from __future__ import annotations

Row = tuple[str, str, str]


def _attention(fused: str, split: str) -> list[Row]:
    """Query, key and value of a fused layer; ``?`` stands for their letters in the others' names."""
    return [(fused, split.replace("?", part), part) for part in "qkv"]


_FLUX: list[Row] = [
    *_attention("double_blocks.*.img_attn.qkv", "transformer_blocks.*.attn.to_?"),
    *(
        (f"double_blocks.*.img_attn.norm.{n}_norm", f"transformer_blocks.*.attn.norm_{n[0]}", "")
        for n in ("query", "key")
    ),
    *(
        (f"double_blocks.*.txt_attn.norm.{n}_norm", f"transformer_blocks.*.attn.norm_added_{n[0]}", "")
        for n in ("query", "key")
    ),
    *(
        (f"single_blocks.*.norm.{n}_norm", f"single_transformer_blocks.*.attn.norm_{n[0]}", "")
        for n in ("query", "key")
    ),
    *_attention("double_blocks.*.txt_attn.qkv", "transformer_blocks.*.attn.add_?_proj"),
    ("double_blocks.*.img_attn.proj", "transformer_blocks.*.attn.to_out.0", ""),
    ("double_blocks.*.txt_attn.proj", "transformer_blocks.*.attn.to_add_out", ""),
    ("double_blocks.*.img_mod.lin", "transformer_blocks.*.norm1.linear", ""),
    ("double_blocks.*.txt_mod.lin", "transformer_blocks.*.norm1_context.linear", ""),
    ("double_blocks.*.img_mlp.0", "transformer_blocks.*.ff.net.0.proj", ""),
    ("double_blocks.*.img_mlp.2", "transformer_blocks.*.ff.net.2", ""),
    ("double_blocks.*.txt_mlp.0", "transformer_blocks.*.ff_context.net.0.proj", ""),
    ("double_blocks.*.txt_mlp.2", "transformer_blocks.*.ff_context.net.2", ""),
    ("double_blocks.*.img_mlp.0", "transformer_blocks.*.ff.linear_in", ""),
    ("double_blocks.*.img_mlp.2", "transformer_blocks.*.ff.linear_out", ""),
    ("double_blocks.*.txt_mlp.0", "transformer_blocks.*.ff_context.linear_in", ""),
    ("double_blocks.*.txt_mlp.2", "transformer_blocks.*.ff_context.linear_out", ""),
    ("single_blocks.*.linear1", "single_transformer_blocks.*.attn.to_q", "1st square"),
    ("single_blocks.*.linear1", "single_transformer_blocks.*.attn.to_k", "2nd square"),
    ("single_blocks.*.linear1", "single_transformer_blocks.*.attn.to_v", "3rd square"),
    ("single_blocks.*.linear1", "single_transformer_blocks.*.proj_mlp", "mlp"),
    ("single_blocks.*.linear1", "single_blocks.*.linear1_qkv", "qkv"),
    ("single_blocks.*.linear1", "single_transformer_blocks.*.attn.to_qkv_mlp_proj", ""),
    ("single_blocks.*.linear2", "single_transformer_blocks.*.proj_out", ""),
    ("single_blocks.*.linear2", "single_transformer_blocks.*.attn.to_out", ""),
    ("single_blocks.*.modulation.lin", "single_transformer_blocks.*.norm.linear", ""),
    ("img_in", "x_embedder", ""),
    ("txt_in", "context_embedder", ""),
    ("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1", ""),
    ("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2", ""),
    ("vector_in.in_layer", "time_text_embed.text_embedder.linear_1", ""),
    ("vector_in.out_layer", "time_text_embed.text_embedder.linear_2", ""),
    ("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1", ""),
    ("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2", ""),
    ("pos_embed_input", "controlnet_x_embedder", ""),
    # Flux 2
    ("double_stream_modulation_img.lin", "double_stream_modulation_img.linear", ""),
    ("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear", ""),
    ("single_stream_modulation.lin", "single_stream_modulation.linear", ""),
    ("time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1", ""),
    ("time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2", ""),
    ("guidance_in.in_layer", "time_guidance_embed.guidance_embedder.linear_1", ""),
    ("guidance_in.out_layer", "time_guidance_embed.guidance_embedder.linear_2", ""),
]

# The names of HunyuanVideo's first release, whose blocks ComfyUI calls as Flux's.
_HUNYUAN_VIDEO: list[Row] = [
    *((f"double_blocks.*.{s}_attn.qkv", f"double_blocks.*.{s}_attn_qkv", "") for s in ("img", "txt")),
    *((f"double_blocks.*.{s}_attn.proj", f"double_blocks.*.{s}_attn_proj", "") for s in ("img", "txt")),
    *((f"double_blocks.*.{s}_mod.lin", f"double_blocks.*.{s}_mod.linear", "") for s in ("img", "txt")),
    *((f"double_blocks.*.{s}_mlp.0", f"double_blocks.*.{s}_mlp.fc1", "") for s in ("img", "txt")),
    *((f"double_blocks.*.{s}_mlp.2", f"double_blocks.*.{s}_mlp.fc2", "") for s in ("img", "txt")),
    ("single_blocks.*.modulation.lin", "single_blocks.*.modulation.linear", ""),
    *(
        (
            f"txt_in.individual_token_refiner.blocks.*.self_attn.{p}",
            f"txt_in.individual_token_refiner.blocks.*.self_attn_{p}",
            "",
        )
        for p in ("qkv", "proj")
    ),
    ("txt_in.individual_token_refiner.blocks.*.mlp.0", "txt_in.individual_token_refiner.blocks.*.mlp.fc1", ""),
    ("txt_in.individual_token_refiner.blocks.*.mlp.2", "txt_in.individual_token_refiner.blocks.*.mlp.fc2", ""),
]

_SD3: list[Row] = [
    *_attention("joint_blocks.*.x_block.attn.qkv", "transformer_blocks.*.attn.to_?"),
    *_attention("joint_blocks.*.x_block.attn2.qkv", "transformer_blocks.*.attn2.to_?"),
    *_attention("joint_blocks.*.context_block.attn.qkv", "transformer_blocks.*.attn.add_?_proj"),
    ("joint_blocks.*.x_block.attn.proj", "transformer_blocks.*.attn.to_out.0", ""),
    ("joint_blocks.*.x_block.attn2.proj", "transformer_blocks.*.attn2.to_out.0", ""),
    ("joint_blocks.*.context_block.attn.proj", "transformer_blocks.*.attn.to_add_out", ""),
    ("joint_blocks.*.x_block.adaLN_modulation.1", "transformer_blocks.*.norm1.linear", ""),
    (
        "joint_blocks.*.context_block.adaLN_modulation.1",
        "transformer_blocks.*.norm1_context.linear",
        "swap in the last",
    ),
    ("joint_blocks.*.x_block.mlp.fc1", "transformer_blocks.*.ff.net.0.proj", ""),
    ("joint_blocks.*.x_block.mlp.fc2", "transformer_blocks.*.ff.net.2", ""),
    ("joint_blocks.*.context_block.mlp.fc1", "transformer_blocks.*.ff_context.net.0.proj", ""),
    ("joint_blocks.*.context_block.mlp.fc2", "transformer_blocks.*.ff_context.net.2", ""),
    *((f"joint_blocks.*.x_block.attn.ln_{p}", f"transformer_blocks.*.attn.norm_{p}", "") for p in "qk"),
    *((f"joint_blocks.*.x_block.attn2.ln_{p}", f"transformer_blocks.*.attn2.norm_{p}", "") for p in "qk"),
    *((f"joint_blocks.*.context_block.attn.ln_{p}", f"transformer_blocks.*.attn.norm_added_{p}", "") for p in "qk"),
    ("x_embedder.proj", "pos_embed.proj", ""),
    ("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1", ""),
    ("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2", ""),
    ("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1", ""),
    ("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2", ""),
]

# Shared by several models of this kind. diffusers keeps the two halves of the last modulation the other way round.
_DIT: list[Row] = [
    ("final_layer.linear", "proj_out", ""),
    ("final_layer.adaLN_modulation.1", "norm_out.linear", "swap"),
]

_PIXART: list[Row] = [
    *_attention("blocks.*.attn.qkv", "transformer_blocks.*.attn1.to_?"),
    ("blocks.*.attn.proj", "transformer_blocks.*.attn1.to_out.0", ""),
    ("blocks.*.cross_attn.q_linear", "transformer_blocks.*.attn2.to_q", ""),
    ("blocks.*.cross_attn.kv_linear", "transformer_blocks.*.attn2.to_k", "first half"),
    ("blocks.*.cross_attn.kv_linear", "transformer_blocks.*.attn2.to_v", "second half"),
    ("blocks.*.cross_attn.proj", "transformer_blocks.*.attn2.to_out.0", ""),
    ("blocks.*.mlp.fc1", "transformer_blocks.*.ff.net.0.proj", ""),
    ("blocks.*.mlp.fc2", "transformer_blocks.*.ff.net.2", ""),
    ("t_embedder.mlp.0", "adaln_single.emb.timestep_embedder.linear_1", ""),
    ("t_embedder.mlp.2", "adaln_single.emb.timestep_embedder.linear_2", ""),
    ("csize_embedder.mlp.0", "adaln_single.emb.resolution_embedder.linear_1", ""),
    ("csize_embedder.mlp.2", "adaln_single.emb.resolution_embedder.linear_2", ""),
    ("ar_embedder.mlp.0", "adaln_single.emb.aspect_ratio_embedder.linear_1", ""),
    ("ar_embedder.mlp.2", "adaln_single.emb.aspect_ratio_embedder.linear_2", ""),
    ("t_block.1", "adaln_single.linear", ""),
    ("y_embedder.y_proj.fc1", "caption_projection.linear_1", ""),
    ("y_embedder.y_proj.fc2", "caption_projection.linear_2", ""),
]

_AURA_FLOW: list[Row] = [
    *((f"double_layers.*.attn.w2{p}", f"joint_transformer_blocks.*.attn.to_{p}", "") for p in "qkv"),
    *((f"double_layers.*.attn.w1{p}", f"joint_transformer_blocks.*.attn.add_{p}_proj", "") for p in "qkv"),
    ("double_layers.*.attn.w2o", "joint_transformer_blocks.*.attn.to_out.0", ""),
    ("double_layers.*.attn.w1o", "joint_transformer_blocks.*.attn.to_add_out", ""),
    ("double_layers.*.mlpX.c_fc1", "joint_transformer_blocks.*.ff.linear_1", ""),
    ("double_layers.*.mlpX.c_fc2", "joint_transformer_blocks.*.ff.linear_2", ""),
    ("double_layers.*.mlpX.c_proj", "joint_transformer_blocks.*.ff.out_projection", ""),
    ("double_layers.*.mlpC.c_fc1", "joint_transformer_blocks.*.ff_context.linear_1", ""),
    ("double_layers.*.mlpC.c_fc2", "joint_transformer_blocks.*.ff_context.linear_2", ""),
    ("double_layers.*.mlpC.c_proj", "joint_transformer_blocks.*.ff_context.out_projection", ""),
    ("double_layers.*.modX.1", "joint_transformer_blocks.*.norm1.linear", ""),
    ("double_layers.*.modC.1", "joint_transformer_blocks.*.norm1_context.linear", ""),
    *((f"single_layers.*.attn.w1{p}", f"single_transformer_blocks.*.attn.to_{p}", "") for p in "qkv"),
    ("single_layers.*.attn.w1o", "single_transformer_blocks.*.attn.to_out.0", ""),
    ("single_layers.*.mlp.c_fc1", "single_transformer_blocks.*.ff.linear_1", ""),
    ("single_layers.*.mlp.c_fc2", "single_transformer_blocks.*.ff.linear_2", ""),
    ("single_layers.*.mlp.c_proj", "single_transformer_blocks.*.ff.out_projection", ""),
    ("single_layers.*.modCX.1", "single_transformer_blocks.*.norm1.linear", ""),
    ("t_embedder.mlp.0", "time_step_proj.linear_1", ""),
    ("t_embedder.mlp.2", "time_step_proj.linear_2", ""),
    ("cond_seq_linear", "context_embedder", ""),
    ("init_x_linear", "pos_embed.proj", ""),
    ("final_linear", "proj_out", ""),
    ("modF.1", "norm_out.linear", "swap"),
]

# Lumina 2 and Z-Image.
_LUMINA: list[Row] = [
    row
    for blocks in ("layers", "context_refiner", "noise_refiner")
    for row in (
        *_attention(f"{blocks}.*.attention.qkv", f"{blocks}.*.attention.to_?"),
        *((f"{blocks}.*.attention.{p}_norm", f"{blocks}.*.attention.norm_{p}", "") for p in "qk"),
        (f"{blocks}.*.attention.out", f"{blocks}.*.attention.to_out.0", ""),
    )
] + [
    ("x_embedder", "all_x_embedder.2-1", ""),
    ("final_layer.linear", "all_final_layer.2-1.linear", ""),
    ("final_layer.adaLN_modulation.1", "all_final_layer.2-1.adaLN_modulation.1", ""),
]

_KREA: list[Row] = [
    row
    for ours, theirs in (
        ("blocks.*", "transformer_blocks.*"),
        ("txtfusion.layerwise_blocks.*", "text_fusion.layerwise_blocks.*"),
        ("txtfusion.refiner_blocks.*", "text_fusion.refiner_blocks.*"),
    )
    for row in (
        *((f"{ours}.attn.w{p}", f"{theirs}.attn.to_{p}", "") for p in "qkv"),
        (f"{ours}.attn.gate", f"{theirs}.attn.to_gate", ""),
        (f"{ours}.attn.wo", f"{theirs}.attn.to_out.0", ""),
        *((f"{ours}.mlp.{p}", f"{theirs}.ff.{p}", "") for p in ("gate", "up", "down")),
    )
] + [
    ("first", "img_in", ""),
    ("tmlp.0", "time_embed.linear_1", ""),
    ("tmlp.2", "time_embed.linear_2", ""),
    ("tproj.1", "time_mod_proj", ""),
    ("txtmlp.1", "txt_in.linear_1", ""),
    ("txtmlp.3", "txt_in.linear_2", ""),
    ("txtfusion.projector", "text_fusion.projector", ""),
    ("last.linear", "final_layer.linear", ""),
]

_WAN: list[Row] = [
    *((f"blocks.*.self_attn.{p}", f"blocks.*.attn1.to_{p}", "") for p in "qkv"),
    *((f"blocks.*.cross_attn.{p}", f"blocks.*.attn2.to_{p}", "") for p in "qkv"),
    ("blocks.*.self_attn.o", "blocks.*.attn1.to_out.0", ""),
    ("blocks.*.cross_attn.o", "blocks.*.attn2.to_out.0", ""),
    ("blocks.*.cross_attn.k_img", "blocks.*.attn2.add_k_proj", ""),
    ("blocks.*.cross_attn.v_img", "blocks.*.attn2.add_v_proj", ""),
    ("blocks.*.ffn.0", "blocks.*.ffn.net.0.proj", ""),
    ("blocks.*.ffn.2", "blocks.*.ffn.net.2", ""),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1", ""),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2", ""),
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1", ""),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2", ""),
    ("time_projection.1", "condition_embedder.time_proj", ""),
    ("head.head", "proj_out", ""),
    *((f"blocks.*.self_attn.norm_{p}", f"blocks.*.attn1.norm_{p}", "") for p in "qk"),
    *((f"blocks.*.cross_attn.norm_{p}", f"blocks.*.attn2.norm_{p}", "") for p in "qk"),
    ("blocks.*.cross_attn.norm_k_img", "blocks.*.attn2.norm_added_k", ""),
    ("blocks.*.norm3", "blocks.*.norm2", ""),
    ("img_emb.proj.0", "condition_embedder.image_embedder.norm1", ""),
    ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj", ""),
    ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2", ""),
    ("img_emb.proj.4", "condition_embedder.image_embedder.norm2", ""),
]

LAYERS: list[Row] = [
    *_FLUX, *_HUNYUAN_VIDEO, *_SD3, *_DIT, *_PIXART, *_AURA_FLOW, *_LUMINA, *_KREA, *_WAN,
]  # fmt: skip
"""Every row."""

# ------------------------------------------------------------------ the U-Net of Stable Diffusion

UNET_LAYERS: list[Row] = [
    ("time_embed.0", "time_embedding.linear_1", ""),
    ("time_embed.2", "time_embedding.linear_2", ""),
    ("label_emb.0.0", "add_embedding.linear_1", ""),
    ("label_emb.0.2", "add_embedding.linear_2", ""),
    ("label_emb.0.0", "class_embedding.linear_1", ""),
    ("label_emb.0.2", "class_embedding.linear_2", ""),
    ("input_blocks.0.0", "conv_in", ""),
    ("out.0", "conv_norm_out", ""),
    ("out.2", "conv_out", ""),
]
"""Its layers outside the blocks; those inside are counted, see ``quant_core.lora.names``."""

UNET_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
"""``{the model's name: diffusers' name}`` inside a residual block."""
