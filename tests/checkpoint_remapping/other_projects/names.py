"""Networks of many kinds, each in the words, the order and the layout of two projects or more: names and sizes alone.

Whether a file is loaded right is seen tensor by tensor: each has a role, which is the same in all projects.
"""

import torch
from torch import nn

from tests.checkpoint_remapping.other_projects.wording import (
    HIDDEN,
    LAYERS,
    Named,
    Parts,
    batch_norms,
    convs,
    layer_norms,
    linear,
)

ARCHITECTURES: dict[str, Named] = {}


def _add(architecture: str, parts: Parts, **projects: str) -> None:
    ARCHITECTURES[architecture] = Named(parts, projects)


_BLOCK: Parts = {role: linear() for role in "qkvo"} | {
    "up": linear(HIDDEN, 96), "down": linear(96), "stem": nn.Linear(HIDDEN, HIDDEN), "head": nn.Linear(HIDDEN, 5)
}  # fmt: skip
_ATTENTION: Parts = {f"{side}{role}": linear() for side in ("", "cross_") for role in "qkvo"} | {
    "qkv": linear(HIDDEN, 3 * HIDDEN), "norm1": layer_norms(), "cross_norm": layer_norms(), "norm3": layer_norms(),
    "wide": linear(HIDDEN, 2 * HIDDEN), "narrow": linear(2 * HIDDEN), "norm": nn.LayerNorm(HIDDEN),
}  # fmt: skip

# Residual networks, and what stands in their blocks

_add(
    "ResNet, normed before",
    {"stem": nn.Conv2d(3, 16, 3), "norm1": batch_norms(16), "conv1": convs(16, 16, bias=False),
     "norm2": batch_norms(16), "conv2": convs(16, 16, bias=False), "last": nn.BatchNorm2d(16),
     "head": nn.Linear(16, 5)},
    norm_first="stem conv1,/layer{n}. norm1 bn1,conv1 conv1,norm2 bn2,conv2 conv2,/ last bn,head fc",
    conv_first="stem stem,/blocks.{i}. conv1 conv1,conv2 conv2,norm1 bn1,norm2 bn2,/ last norm,head head",
    words="stem stem,/blocks.{i}. norm1 norm_a,conv1 conv_a,norm2 norm_b,conv2 conv_b,/ last final_norm,"
          "head classifier",
    numbers="stem net.0,/net.{n}. norm1 0,conv1 2,norm2 3,conv2 5,/ last net.4,head net.7",
)  # fmt: skip
_add(
    "ResNet, normed behind",
    {"stem": nn.Conv2d(3, 16, 3), "norm1": batch_norms(16), "conv1": convs(16, 16, bias=False),
     "norm2": batch_norms(16), "conv2": convs(16, 16, bias=False), "last": nn.BatchNorm2d(16),
     "head": nn.Linear(16, 5)},
    torchvision="stem conv1,last bn1,/layer1.{i}. conv1 conv1,norm1 bn1,conv2 conv2,norm2 bn2,/ head fc",
    convs_first="stem stem.conv,last stem.norm,/blocks.{i}. conv1 conv1,conv2 conv2,norm1 norm1,norm2 norm2,"
                "/ head head",
    second_first="head head,/body.{i}. conv2 conv2,conv1 conv1,norm2 bn2,norm1 bn1,/ stem stem,last stem_bn",
    words="stem entry.filter,last entry.scale,/unit.{i}. conv1 first.filter,norm1 first.scale,conv2 second.filter,"
          "norm2 second.scale,/ head scores",
    HF="stem embedder.embedder.convolution,last embedder.embedder.normalization,"
       "/encoder.layers.{i}. conv1 layer.0.convolution,norm1 layer.0.normalization,conv2 layer.1.convolution,"
       "norm2 layer.1.normalization,/ head classifier.1",
)  # fmt: skip

# Two or more of a kind side by side: what tells them apart is not in their sizes

_add(
    "actor and critic",
    {"trunk": nn.Linear(HIDDEN, HIDDEN), "a": linear(), "b": linear(), "action": nn.Linear(HIDDEN, 4),
     "value": nn.Linear(HIDDEN, 1)},
    actor_critic="trunk trunk,a actor.{i},action actor.3,b critic.{i},value critic.3",
    pi_vf="trunk features,a mlp_extractor.policy_net.{i},b mlp_extractor.value_net.{i},action action_net,"
          "value value_net",
    value_first="trunk shared,b vf.{i},a pi.{i},value vf_out,action pi_out",
)  # fmt: skip
_add(
    "heads of one shape",
    {"trunk": linear(), "boxes": nn.Linear(HIDDEN, 4), "points": nn.Linear(HIDDEN, 4),
     "scores": nn.Linear(HIDDEN, 4)},
    detection="trunk trunk.{i},scores cls_head,boxes bbox_head,points kpt_head",
    words="trunk body.{i},boxes regression,points landmarks,scores classification",
    numbers="trunk layers.{i},boxes heads.0,scores heads.1,points heads.2",
)  # fmt: skip

# Transformers and others, in whose blocks some layers have one size

_add(
    "windows and merging",
    {"norm1": layer_norms(), "qkv": linear(HIDDEN, 3 * HIDDEN), "q": linear(), "k": linear(), "v": linear(),
     "o": linear(), "norm2": layer_norms(), "fc1": linear(HIDDEN, 4 * HIDDEN), "fc2": linear(4 * HIDDEN, HIDDEN),
     "norm": nn.LayerNorm(HIDDEN), "reduction": linear(2 * HIDDEN, HIDDEN, False),
     "merge_norm": layer_norms(2 * HIDDEN)},
    Swin="/layers.{i}. norm1 blocks.0.norm1,qkv blocks.0.attn.qkv,o blocks.0.attn.proj,norm2 blocks.0.norm2,"
         "fc1 blocks.0.mlp.fc1,fc2 blocks.0.mlp.fc2,reduction downsample.reduction,merge_norm downsample.norm,"
         "/ norm norm",
    HF="/encoder.layers.{i}. norm1 blocks.0.layernorm_before,q blocks.0.attention.self.query,"
       "k blocks.0.attention.self.key,v blocks.0.attention.self.value,o blocks.0.attention.output.dense,"
       "norm2 blocks.0.layernorm_after,fc1 blocks.0.intermediate.dense,fc2 blocks.0.output.dense,"
       "reduction downsample.reduction,merge_norm downsample.norm,/ norm layernorm",
    torchvision="/features.{i}. norm1 0.norm1,qkv 0.attn.qkv,o 0.attn.proj,norm2 0.norm2,fc1 0.mlp.0,fc2 0.mlp.3,"
                "reduction 1.reduction,merge_norm 1.norm,/ norm norm",
)  # fmt: skip
_add(
    "ConvNeXt",
    {"depthwise": [nn.Conv2d(16, 16, 7, padding=3, groups=16) for _ in range(LAYERS)], "norms": layer_norms(16),
     "wide": linear(16, 64), "narrow": linear(64, 16),
     "scale": [nn.Parameter(torch.zeros(16)) for _ in range(LAYERS)], "stem": nn.Conv2d(3, 16, 4, 4),
     "stem_norm": nn.LayerNorm(16), "norm": nn.LayerNorm(16), "head": nn.Linear(16, 5)},
    Facebook="stem downsample_layers.0.0,stem_norm downsample_layers.0.1,/stages.0.{i}. scale gamma,depthwise dwconv,"
             "norms norm,wide pwconv1,narrow pwconv2,/ norm norm,head head",
    timm="stem stem.0,stem_norm stem.1,/stages.0.blocks.{i}. scale gamma,depthwise conv_dw,norms norm,wide mlp.fc1,"
         "narrow mlp.fc2,/ norm head.norm,head head.fc",
    torchvision="stem features.0.0,stem_norm features.0.1,/features.1.{i}. scale layer_scale,depthwise block.0,"
                "norms block.2,wide block.3,narrow block.5,/ norm classifier.0,head classifier.2",
    words="head out,norm out_norm,/trunk.{i}. depthwise spatial,norms ln,wide grow,narrow shrink,scale layerscale,"
          "/ stem patch,stem_norm patch_norm",
)  # fmt: skip
_add(
    "squeeze and excitation",
    {"stem": nn.Conv2d(3, 16, 3), "conv": convs(16, 16), "norms": batch_norms(16),
     "reduce": convs(16, 4, 1), "expand": convs(4, 16, 1), "head": nn.Linear(16, 5)},
    timm="stem conv_stem,/blocks.{i}. conv conv,norms bn,reduce se.conv_reduce,expand se.conv_expand,"
         "/ head classifier",
    torchvision="stem features.0,/features.{n}. conv 0.0,norms 0.1,reduce 1.fc1,expand 1.fc2,/ head fc",
    HF="stem embeddings.convolution,/encoder.blocks.{i}. conv projection.conv,norms projection.bn,"
       "reduce squeeze_excite.reduce,expand squeeze_excite.expand,/ head classifier",
)  # fmt: skip
_add(
    "RWKV-like",
    {"norm1": layer_norms(), "norm2": layer_norms(), **{f"t{name}": linear(bias=False) for name in "krvo"},
     **{f"c{name}": linear(bias=False) for name in "krv"}},
    original="/blocks.{i}. norm1 ln1,norm2 ln2,tk att.key,tv att.value,tr att.receptance,to att.output,ck ffn.key,"
             "cr ffn.receptance,cv ffn.value",
    HF="/rwkv.blocks.{i}. norm1 ln1,norm2 ln2,tk attention.key,tv attention.value,tr attention.receptance,"
       "to attention.output,ck feed_forward.key,cr feed_forward.receptance,cv feed_forward.value",
    words="/h.{i}. norm1 n1,tr time.r,tk time.k,tv time.v,to time.o,norm2 n2,cr channel.r,ck channel.k,cv channel.v",
)  # fmt: skip
_add(
    "gated feed-forward",
    {"norms": layer_norms(), "gate": linear(HIDDEN, 48, False), "up": linear(HIDDEN, 48, False),
     "down": linear(48, HIDDEN, False)},
    proj="/layers.{i}. norms norm,gate gate_proj,up up_proj,down down_proj",
    w_gate="/blocks.{i}. norms norm,gate w_gate,up w_up,down w_down",
    wi="/layers.{i}. norms norm,gate wi_0,up wi_1,down wo",
    w123="/layers.{i}. norms norm,gate w1,down w2,up w3",
    fc="/h.{i}. norms norm,gate fc_1,up fc_2,down proj",
    Qwen="/h.{i}. norms norm,gate w2,up w1,down c_proj",
    up_first="/h.{i}. norms norm,up fc1,gate fc_gate,down fc2",
    xformers="/stack.{i}. norms norm,gate value_gate,up value,down out",
)  # fmt: skip
_add(
    "cross-attention",
    {"norms": layer_norms(), "q": linear(bias=False), "k": linear(bias=False), "v": linear(bias=False), "o": linear(),
     "context": nn.Linear(HIDDEN, HIDDEN), "kv": linear(HIDDEN, 2 * HIDDEN, False)},
    to_q="context context,/layers.{i}. norms norm,q to_q,k to_k,v to_v,o to_out.0",
    q="context context,/blocks.{i}. norms norm,q q,k k,v v,o proj",
    w_q="context context,/stack.{i}. norms norm,q w_q,k w_k,v w_v,o fc",
    words="context memory,/h.{i}. v values,k keys,q queries,o unify,norms ln",
    kv="context context,/b.{i}. norms norm,q to_q,kv to_kv,o to_out",
    theta="context g,/nl.{i}. q theta,k phi,v g,o W,norms norm",
)  # fmt: skip
_add(
    "inception with equal branches",
    {"stem": nn.Conv2d(3, 16, 3), **{f"b{n}": convs(16, 16) for n in range(4)}},
    branches="stem stem,/blocks.{i}. b0 branch1,b1 branch2,b2 branch3,b3 branch4",
    words="stem entry,/cells.{i}. b3 pool,b0 one,b2 five,b1 three",
    numbers="stem stem,/cells.{i}. b0 0,b1 1,b2 2,b3 3",
)  # fmt: skip
_add(
    "positions and tokens",
    {"cls": nn.Parameter(torch.zeros(1, 1, HIDDEN)), "distilled": nn.Parameter(torch.zeros(1, 1, HIDDEN)),
     "positions": nn.Parameter(torch.zeros(1, 9, HIDDEN)), "layers": linear(), "a": nn.Linear(HIDDEN, 4),
     "b": nn.Linear(HIDDEN, 4)},
    timm="cls cls_token,distilled dist_token,positions pos_embed,layers blocks.{i},a head,b head_dist",
    HF="cls embeddings.cls_token,distilled embeddings.distillation_token,positions embeddings.position_embeddings,"
       "layers encoder.{i},a cls_classifier,b distillation_classifier",
    words="positions positional,distilled extra,cls token,layers body.{i},b second,a first",
)  # fmt: skip
_add(
    "feature pyramid, laterals of their own sizes",
    {"stem": nn.Conv2d(3, 8, 3, padding=1), "down": [nn.Conv2d(8, 12, 3), nn.Conv2d(12, 20, 3)]}
    | {f"lateral{i}": nn.Conv2d(size, 16, 1) for i, size in enumerate((8, 12, 20))}
    | {f"smooth{i}": nn.Conv2d(16, 16, 3) for i in range(3)},
    from_the_coarsest="stem conv1,down layer{n},smooth2 smooth1,smooth1 smooth2,smooth0 smooth3,lateral2 latlayer1,"
                      "lateral1 latlayer2,lateral0 latlayer3",
    lists="stem stem,down body.{i},lateral0 lateral_convs.0,lateral1 lateral_convs.1,lateral2 lateral_convs.2,"
          "smooth0 fpn_convs.0,smooth1 fpn_convs.1,smooth2 fpn_convs.2",
    detectron="lateral0 fpn_lateral2,smooth0 fpn_output2,lateral1 fpn_lateral3,smooth1 fpn_output3,"
              "lateral2 fpn_lateral4,smooth2 fpn_output4,stem bottom_up.stem,down bottom_up.res{n}",
)  # fmt: skip
_add(
    "two convolutions of each block",
    {"stem": nn.Conv2d(3, 16, 3), "first": convs(16, 16), "second": convs(16, 16)},
    lists="stem conv_pre,first convs1.{i},second convs2.{i}",
    blocks="stem stem,/layers.{i}. first conv1,second conv2",
    sequential="stem head,/blocks.{i}. first 0,second 2",
    other_lists="stem pre,second conv2.{i},first conv1.{i}",
)  # fmt: skip
_add(
    "decoders of one word",
    {"stem": nn.Conv2d(3, 16, 3), "down": convs(16, 16), "down_norm": batch_norms(16),
     "middle": nn.Conv2d(16, 16, 3, padding=1), "up": convs(32, 16), "up_norm": batch_norms(16),
     "head": nn.Conv2d(16, 3, 1)},
    rising="stem conv_in,/enc{n}. down conv,down_norm norm,/ middle mid,/dec{n}. up conv,up_norm norm,/ head conv_out",
    falling="stem inc,/encoder{n}. down c,down_norm n,/ middle bottom,/dec{r}. up c,up_norm n,/ head outc",
    upconv="stem first,/e{n}. down block,down_norm bn,/ middle center,/upconv{r}. up block,up_norm bn,/ head last",
    lists="stem s,/encoder.{i}. down 0,down_norm 1,/ middle m,/decoder.{i}. up 0,up_norm 1,/ head h",
)  # fmt: skip
_add(
    "twins in lists",
    {f"{twin}{i}": nn.Linear(*size) for twin in "ab" for i, size in enumerate(((HIDDEN, 16), (16, 16), (16, 1)), 1)},
    by_layer="a1 layers.0.0,b1 layers.0.1,a2 layers.1.0,b2 layers.1.1,a3 layers.2.0,b3 layers.2.1",
    by_twin="a1 nets.0.0,a2 nets.0.1,a3 nets.0.2,b1 nets.1.0,b2 nets.1.1,b3 nets.1.2",
    words="a1 q1.fc1,a2 q1.fc2,a3 q1.fc3,b1 q2.fc1,b2 q2.fc2,b3 q2.fc3",
)  # fmt: skip
_add(
    "convolutions of rows and columns",
    {"stem": nn.Conv2d(3, 16, 3), "rows": convs(16, 16, (1, 7)), "columns": convs(16, 16, (7, 1)),
     "head": nn.Linear(16, 5)},
    rows_first="stem stem,/b.{i}. rows conv_1,columns conv_2,/ head fc",
    columns_first="stem inp,/m.{i}. columns conv_1,rows conv_2,/ head out",
    letters="stem stem,/b.{i}. columns conv_a,rows conv_b,/ head head",
    sequential="stem layers.0,/layers.{n}. columns 0,rows 1,/ head out",
)  # fmt: skip
_add(
    "decoders with a norm of the cross-attention",
    {f"{side}{role}": linear() for side in ("", "cross_") for role in "qkvo"}
    | {"norm1": layer_norms(), "norm2": layer_norms(), "norm3": layer_norms()}
    | {"wide": linear(HIDDEN, 48), "narrow": linear(48, HIDDEN)},
    last="/h.{i}. q attn.query,k attn.key,v attn.value,o attn.out,cross_q cross.query,cross_k cross.key,"
         "cross_v cross.value,cross_o cross.out,wide mlp.fc1,narrow mlp.fc2,norm1 norm1,norm2 norm2,norm3 final_norm",
    between="/h.{i}. q self_attn.to_q,k self_attn.to_k,v self_attn.to_v,o self_attn.to_out,cross_q cross_attn.to_q,"
            "cross_k cross_attn.to_k,cross_v cross_attn.to_v,cross_o cross_attn.to_out,wide mlp.0,narrow mlp.2,"
            "norm1 norm1,norm2 cross_norm,norm3 norm2",
    fairseq="/h.{i}. q self_attn.q_proj,k self_attn.k_proj,v self_attn.v_proj,o self_attn.out_proj,"
            "cross_q encoder_attn.q_proj,cross_k encoder_attn.k_proj,cross_v encoder_attn.v_proj,"
            "cross_o encoder_attn.out_proj,wide fc1,narrow fc2,norm1 self_attn_layer_norm,"
            "norm2 encoder_attn_layer_norm,norm3 final_layer_norm",
)  # fmt: skip

# Where projects use one number, or one word, for different parts: what is written is no evidence there

_add(
    "depth from the levels of a trunk",
    {"trunk": [nn.Conv2d(*sizes, 3) for sizes in ((3, 8), (8, 12), (12, 16), (16, 20))],
     "blocks": convs(20, 20, count=6), "lateral": [nn.Conv2d(size, 8, 1) for size in (8, 12, 16, 20)],
     "one": convs(8, 8, count=4), "two": convs(8, 8, count=4), "out": nn.Conv2d(8, 1, 1)},
    coarsest_first="trunk body.levels.{i},blocks body.blocks.{i},out head,lateral reassemble.{i},"
                   "/decoder.blocks.{i}. one conv1,two conv2",
    finest_first="trunk body.levels.{i},blocks body.blocks.{i},out head,lateral neck.reassemble.{i},"
                 "/neck.fusion_stage.layers.{r}. one conv1,two conv2",
    refined="trunk body.levels.{i},blocks body.blocks.{i},out head,lateral scratch.layer{n}_rn,"
            "/scratch.refinenet{r}. one conv1,two conv2",
    necks="trunk body.levels.{i},blocks body.blocks.{i},out head,lateral neck.project.{i},"
          "/neck.blocks.{i}. one conv1,two conv2",
    levels="trunk body.levels.{i},blocks body.blocks.{i},out head,lateral pyramid.inputs.{i},"
           "/pyramid.stages.{r}. one 0,two 1",
    convs="trunk body.levels.{i},blocks body.blocks.{i},out head,lateral lateral_convs.{i},"
          "/smooth_convs.{r}. one conv1,two conv2",
)  # fmt: skip
_add(
    "norms before and behind",
    _BLOCK | {role: layer_norms() for role in ("before_attn", "after_attn", "before_mlp", "after_mlp")},
    in_order="stem stem,head head,/blocks.{i}. up mlp.fc1,down mlp.fc2,q attn.q,k attn.k,v attn.v,o attn.proj,"
             "before_attn norm1,after_attn norm2,before_mlp norm3,after_mlp norm4",
    post_last="stem stem,head head,/layers.{i}. up mlp.linear1,down mlp.linear2,q attn.query,k attn.key,v attn.value,"
              "o attn.out_proj,before_attn ln_1,before_mlp ln_2,after_attn ln_3,after_mlp ln_4",
    post="stem stem,head head,/layers.{i}. up mlp.linear1,down mlp.linear2,q attn.query,k attn.key,v attn.value,"
         "o attn.out_proj,before_attn ln_1,before_mlp ln_2,after_attn post_ln_1,after_mlp post_ln_2",
    behind_first="stem stem,head head,/layers.{i}. up mlp.linear1,down mlp.linear2,q attn.query,k attn.key,"
                 "v attn.value,o attn.out_proj,after_attn norm1,after_mlp norm2,before_attn pre_norm1,"
                 "before_mlp pre_norm2",
    gemma="stem stem,head head,/layers.{i}. up mlp.linear1,down mlp.linear2,q attn.query,k attn.key,v attn.value,"
          "o attn.out_proj,before_attn input_layernorm,after_attn post_attention_layernorm,"
          "before_mlp pre_feedforward_layernorm,after_mlp post_feedforward_layernorm",
    words="stem stem,head head,/layers.{i}. up mlp.linear1,down mlp.linear2,q attn.query,k attn.key,v attn.value,"
          "o attn.out_proj,before_attn attention_norm,after_attn attention_post_norm,before_mlp ffn_norm,"
          "after_mlp ffn_post_norm",
)  # fmt: skip
_add(
    "norms of a block that attends twice",
    _BLOCK | {f"c{role}": linear() for role in "qkvo"}
    | {"norm_self": layer_norms(), "norm_cross": layer_norms(), "norm_mlp": layer_norms()},
    in_order="stem stem,head head,/blocks.{i}. up mlp.fc1,down mlp.fc2,q attn.q,k attn.k,v attn.v,o attn.proj,"
             "cq cross_attn.q,ck cross_attn.k,cv cross_attn.v,co cross_attn.proj,norm_self norm1,norm_cross norm2,"
             "norm_mlp norm3",
    added="stem stem,head head,/layers.{i}. up mlp.linear1,down mlp.linear2,q attn.query,k attn.key,v attn.value,"
          "o attn.out_proj,cq cross_attn.query,ck cross_attn.key,cv cross_attn.value,co cross_attn.out_proj,"
          "norm_self ln_1,norm_mlp ln_2,norm_cross ln_3",
    added_by_name="stem stem,head head,/layers.{i}. up mlp.linear1,down mlp.linear2,q attn.query,k attn.key,"
                  "v attn.value,o attn.out_proj,cq cross_attn.query,ck cross_attn.key,cv cross_attn.value,"
                  "co cross_attn.out_proj,norm_self ln_1,norm_mlp ln_2,norm_cross ln_cross",
)  # fmt: skip

# Encoders and decoders, whose layers are all of a few sizes

_add(
    "BERT",
    _ATTENTION,
    fairseq="/sentence_encoder.layers.{i}. k self_attn.k_proj,v self_attn.v_proj,q self_attn.q_proj,"
            "o self_attn.out_proj,norm1 self_attn_layer_norm,wide fc1,narrow fc2,norm3 final_layer_norm",
    XLM="/attentions.{i}. q q_lin,k k_lin,v v_lin,o out_lin,/ norm1 layer_norm1.{i},/ffns.{i}. wide lin1,narrow lin2,"
        "/ norm3 layer_norm2.{i}",
    codertimo="/transformer_blocks.{i}. q attention.linear_layers.0,k attention.linear_layers.1,"
              "v attention.linear_layers.2,o attention.output_linear,wide feed_forward.w_1,narrow feed_forward.w_2,"
              "norm1 input_sublayer.norm,norm3 output_sublayer.norm",
    Wav2Vec2="/encoder.layers.{i}. k attention.k_proj,v attention.v_proj,q attention.q_proj,o attention.out_proj,"
             "norm1 layer_norm,wide feed_forward.intermediate_dense,narrow feed_forward.output_dense,"
             "norm3 final_layer_norm",
)  # fmt: skip
_add(
    "ViT encoder",
    _ATTENTION,
    timm="/blocks.{i}. norm1 norm1,qkv attn.qkv,o attn.proj,norm3 norm2,wide mlp.fc1,narrow mlp.fc2,/ norm norm",
    norm2_before_norm1="/blocks.{i}. norm3 norm2,norm1 norm1,wide mlp.fc1,narrow mlp.fc2,o attn.proj,v attn.v,"
                       "k attn.k,q attn.q,/ norm norm",
    HF="/encoder.layer.{i}. q attention.attention.query,k attention.attention.key,v attention.attention.value,"
       "o attention.output.dense,wide intermediate.dense,narrow output.dense,norm1 layernorm_before,"
       "norm3 layernorm_after,/ norm layernorm",
    lucidrains="/layers.{i}. norm1 0.fn.norm,qkv 0.fn.to_qkv,o 0.fn.to_out.0,norm3 1.fn.norm,wide 1.fn.net.0,"
               "narrow 1.fn.net.3,/ norm norm",
    annotated="/layers.{i}. q self_attn.linears.0,k self_attn.linears.1,v self_attn.linears.2,o self_attn.linears.3,"
              "wide feed_forward.w_1,narrow feed_forward.w_2,norm1 sublayer.0.norm,norm3 sublayer.1.norm,/ norm norm",
)  # fmt: skip
_add(
    "OPT",
    _ATTENTION,
    HF="norm decoder.final_layer_norm,/decoder.layers.{i}. k self_attn.k_proj,v self_attn.v_proj,q self_attn.q_proj,"
       "o self_attn.out_proj,norm1 self_attn_layer_norm,wide fc1,narrow fc2,norm3 final_layer_norm",
    metaseq="/decoder.layers.{i}. qkv self_attn.qkv_proj,o self_attn.out_proj,norm1 self_attn_layer_norm,wide fc1,"
            "narrow fc2,norm3 final_layer_norm,/ norm decoder.layer_norm",
)  # fmt: skip
_add(
    "MBart decoder",
    _ATTENTION,
    HF_4="/layers.{i}. k self_attn.k_proj,v self_attn.v_proj,q self_attn.q_proj,o self_attn.out_proj,"
         "norm1 self_attn_layer_norm,cross_k encoder_attn.k_proj,cross_v encoder_attn.v_proj,"
         "cross_q encoder_attn.q_proj,cross_o encoder_attn.out_proj,cross_norm encoder_attn_layer_norm,wide fc1,"
         "narrow fc2,norm3 final_layer_norm,/ norm layer_norm",
    Whisper_s_words="/blocks.{i}. q attn.query,k attn.key,v attn.value,o attn.out,norm1 attn_ln,"
                    "cross_q cross_attn.query,cross_k cross_attn.key,cross_v cross_attn.value,cross_o cross_attn.out,"
                    "cross_norm cross_attn_ln,wide mlp.0,narrow mlp.2,norm3 mlp_ln,/ norm ln",
    annotated="/decoder.layers.{i}. q self_attn.linears.0,k self_attn.linears.1,v self_attn.linears.2,"
              "o self_attn.linears.3,cross_q src_attn.linears.0,cross_k src_attn.linears.1,"
              "cross_v src_attn.linears.2,cross_o src_attn.linears.3,wide feed_forward.w_1,narrow feed_forward.w_2,"
              "norm1 sublayer.0.norm,cross_norm sublayer.1.norm,norm3 sublayer.2.norm,/ norm layer_norm",
)  # fmt: skip
_add(
    "blocks of diffusion",
    _ATTENTION,
    diffusers="/transformer_blocks.{i}. norm1 norm1,q attn1.to_q,k attn1.to_k,v attn1.to_v,o attn1.to_out.0,"
              "cross_norm norm2,cross_q attn2.to_q,cross_k attn2.to_k,cross_v attn2.to_v,cross_o attn2.to_out.0,"
              "norm3 norm3,wide ff.net.0,narrow ff.net.2",
    CompVis="/transformer_blocks.{i}. q attn1.to_q,k attn1.to_k,v attn1.to_v,o attn1.to_out.0,wide ff.net.0,"
            "narrow ff.net.2,cross_q attn2.to_q,cross_k attn2.to_k,cross_v attn2.to_v,cross_o attn2.to_out.0,"
            "norm1 norm1,cross_norm norm2,norm3 norm3",
    q_k_v_proj="/transformer_blocks.{i}. norm1 norm1,q attn1.q,k attn1.k,v attn1.v,o attn1.proj,cross_norm norm2,"
               "cross_q attn2.q,cross_k attn2.k,cross_v attn2.v,cross_o attn2.proj,norm3 norm3,wide ff.net.0,"
               "narrow ff.net.2",
    words="/transformer_blocks.{i}. q attn1.query,k attn1.key,v attn1.value,o attn1.output,wide ff.net.0,"
          "narrow ff.net.2,cross_q attn2.query,cross_k attn2.key,cross_v attn2.value,cross_o attn2.output,"
          "norm1 norm1,cross_norm norm2,norm3 norm3",
)  # fmt: skip
