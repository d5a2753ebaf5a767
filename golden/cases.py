"""The goldens: what each model looks like and why it exists.

Every model is as small as the property it shows allows. A case varies one thing for a reason; read `reason` first.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Storage:
    """One way to write a case's weights to disk."""

    directory: str
    schema: str  # "native": what save_pretrained writes; "released": the nested schema of the release
    dtype: str = "bfloat16"  # dtype of every tensor outside the three F32 classes
    shards: int = 1


@dataclass(frozen=True)
class Case:
    """A model, its token lengths, and the ways it is stored. Results are recorded from `storages[0]`."""

    name: str
    reason: str
    seed: int
    lengths: tuple[int, ...]
    attention: str  # a letter per layer: F full, S sparse
    mlp: str  # a letter per layer: D dense, M mixture of experts
    hidden_size: int
    heads: int
    kv_heads: int  # equals the number of index heads
    head_dim: int
    rotary_dim: int
    index_head_dim: int
    block: int
    topk_blocks: int
    local_blocks: int
    experts: int
    topk_experts: int
    storages: tuple[Storage, ...]
    rope_theta: float = 5e6
    vocab: int = 64
    expert_width: int = 16
    shared_width: int = 16
    dense_width: int = 48
    max_positions: int = 1024
    constants: dict = field(default_factory=dict)  # overrides of released scalar constants

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.attention)


CASES = (
    Case(
        name="basic",
        reason="smallest mixed model; its weights are stored four ways: one file, two shards, BF16, F32, both schemas",
        seed=100,
        lengths=(37, 5, 61),
        attention="FS",
        mlp="DM",
        hidden_size=32,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rotary_dim=8,
        index_head_dim=16,
        block=8,
        topk_blocks=3,
        local_blocks=1,
        experts=8,
        topk_experts=2,
        storages=(
            Storage("basic", "native"),
            Storage("basic-released", "released"),
            Storage("basic-sharded", "released", shards=2),
            Storage("basic-f32", "native", dtype="float32"),
        ),
    ),
    Case(
        name="interleaved",
        reason="sparse attention and MoE independent of each other and of depth; four index heads; a length-1 sequence",
        seed=200,
        lengths=(131, 1, 47, 16),
        attention="SFSF",
        mlp="MMDD",
        hidden_size=32,
        heads=8,
        kv_heads=4,
        head_dim=16,
        rotary_dim=8,
        index_head_dim=16,
        block=16,
        topk_blocks=4,
        local_blocks=1,
        experts=6,
        topk_experts=2,
        rope_theta=1e7,
        storages=(Storage("interleaved", "released"),),
    ),
    Case(
        name="all_sparse",
        reason="every layer sparse, dense MLP below MoE (the M3.1-Flash pattern); two local blocks inside top-5",
        seed=300,
        lengths=(93, 150),
        attention="SSS",
        mlp="DMM",
        hidden_size=32,
        heads=8,
        kv_heads=2,
        head_dim=16,
        rotary_dim=8,
        index_head_dim=16,
        block=8,
        topk_blocks=5,
        local_blocks=2,
        experts=8,
        topk_experts=3,
        rope_theta=1e7,
        storages=(Storage("all_sparse", "released"),),
    ),
    Case(
        name="block128",
        reason="the released head geometry (head_dim 128, rotary 64, block 128), long enough for top-3 to be sparse",
        seed=400,
        lengths=(601, 130),
        attention="SF",
        mlp="MD",
        hidden_size=32,
        heads=4,
        kv_heads=2,
        head_dim=128,
        rotary_dim=64,
        index_head_dim=128,
        block=128,
        topk_blocks=3,
        local_blocks=1,
        experts=8,
        topk_experts=4,
        storages=(Storage("block128", "native"),),
    ),
    Case(
        name="block128_theta1e7",
        reason="the released head geometry at the rotary base of M3.1-Flash; one long sequence, two local blocks",
        seed=500,
        lengths=(577,),
        attention="S",
        mlp="M",
        hidden_size=32,
        heads=4,
        kv_heads=2,
        head_dim=128,
        rotary_dim=64,
        index_head_dim=128,
        block=128,
        topk_blocks=3,
        local_blocks=2,
        experts=8,
        topk_experts=4,
        rope_theta=1e7,
        storages=(Storage("block128_theta1e7", "released"),),
    ),
    Case(
        name="one_kv_head",
        reason="a single KV head and index head shared by all query heads; sparse layer below a full one",
        seed=600,
        lengths=(100, 64),
        attention="SF",
        mlp="DM",
        hidden_size=32,
        heads=4,
        kv_heads=1,
        head_dim=16,
        rotary_dim=16,
        index_head_dim=16,
        block=16,
        topk_blocks=3,
        local_blocks=1,
        experts=4,
        topk_experts=2,
        storages=(Storage("one_kv_head", "native"),),
    ),
    Case(
        name="odd_constants",
        reason="nothing a power of two: 3 index heads narrower than the heads, odd vocabulary and widths, and every "
        "scalar constant off its released value, so that a hard-coded one shows",
        seed=700,
        lengths=(75, 23, 2),
        attention="SFS",
        mlp="MDM",
        hidden_size=40,
        heads=6,
        kv_heads=3,
        head_dim=24,
        rotary_dim=12,
        index_head_dim=16,
        block=8,
        topk_blocks=4,
        local_blocks=2,
        experts=7,
        topk_experts=3,
        vocab=101,
        expert_width=24,  # a multiple of 8: the bf16 grouped GEMM of torch asks for it
        shared_width=20,
        dense_width=44,
        constants={
            "swiglu_alpha": 1.5,
            "swiglu_limit": 4.0,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-5,
        },
        storages=(Storage("odd_constants", "released"),),
    ),
    Case(
        name="no_sparse",
        reason="full attention everywhere (use_sparse_attention false), MoE in every layer, 4 of 16 experts",
        seed=800,
        lengths=(40, 33),
        attention="FF",
        mlp="MM",
        hidden_size=32,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rotary_dim=8,
        index_head_dim=16,
        block=16,
        topk_blocks=4,
        local_blocks=1,
        experts=16,
        topk_experts=4,
        expert_width=8,
        storages=(Storage("no_sparse", "released"),),
    ),
    Case(
        name="wide_dense",
        reason="no experts at all; matrices large enough that their gradients are recorded as samples",
        seed=900,
        lengths=(203, 90),
        attention="FS",
        mlp="DD",
        hidden_size=96,
        heads=8,
        kv_heads=4,
        head_dim=32,
        rotary_dim=16,
        index_head_dim=32,
        block=16,
        topk_blocks=5,
        local_blocks=2,
        experts=4,
        topk_experts=2,
        vocab=128,
        dense_width=160,
        storages=(Storage("wide_dense", "native"),),
    ),
)
