"""Runs a checkpoint under transformers and records what a reader of the same checkpoint must reproduce.

Each sequence runs alone; the records are concatenated in the order of the sequences, as one packed batch would be.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLDenseMLP,
    MiniMaxM3VLExperts,
    MiniMaxM3VLIndexer,
    MiniMaxM3VLTopKRouter,
    apply_rotary_pos_emb,
)

from cases import Case
from model import load

# A selection decided by less than this is decided by fp32 rounding: two right implementations may differ.
EXPERT_GAP_MIN = 1e-5
BLOCK_GAP_RELATIVE_MIN = 5e-6

# Gradients of at most this many elements are recorded whole, larger ones as a sample of SAMPLE elements.
WHOLE_MAX = 12288
SAMPLE = 4096
LOGIT_ROWS_SAMPLED = 8


class NearTie(Exception):
    """The seed leaves a selection to rounding."""


@dataclass
class Coverage:
    """What the inputs exercised. A golden whose counts are zero shows less than its name says."""

    expert_gap_min: float = float("inf")
    block_gap_relative_min: float = float("inf")
    rows_with_blocks_left_out: int = 0
    rows_of_sparse_layers: int = 0
    router_rows: int = 0
    router_rows_changed_by_bias: int = 0
    gate_or_up_clamped: int = 0
    gate_and_up_values: int = 0
    experts_without_tokens: int = 0

    def count_clamped(self, gate_up: torch.Tensor, limit: float) -> None:
        """Counts pre-activations outside the swigluoai limits."""
        gate, up = gate_up.chunk(2, dim=-1)
        self.gate_or_up_clamped += int((gate > limit).sum() + (up.abs() > limit).sum())
        self.gate_and_up_values += gate_up.numel()


@dataclass
class Trace:
    """What the hooks saw of one sequence, by layer."""

    blocks: dict[int, np.ndarray] = field(default_factory=dict)  # i32 [index_heads, T, topk]
    experts: dict[int, np.ndarray] = field(default_factory=dict)  # i32 [T, k]
    expert_weights: dict[int, np.ndarray] = field(default_factory=dict)  # f32 [T, k]


def layer_of(module_name: str) -> int:
    """Decoder layer index in a module's name."""
    parts = module_name.split(".")
    return int(parts[parts.index("layers") + 1])


def block_scores(indexer: MiniMaxM3VLIndexer, hidden: torch.Tensor, cos_sin: tuple) -> torch.Tensor:
    """Max-pooled causal scores [index_heads, T, blocks] before any block is forced, from the indexer's own weights."""
    tokens = hidden.shape[1]
    iq = indexer.q_norm(indexer.q_proj(hidden).view(1, tokens, -1, indexer.head_dim)).transpose(1, 2)
    ik = indexer.k_norm(indexer.k_proj(hidden).view(1, tokens, 1, indexer.head_dim)).transpose(1, 2)
    iq, ik = apply_rotary_pos_emb(iq, ik, *cos_sin)
    scores = (iq.float() @ ik.float().transpose(-1, -2))[0]
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
    padding = -tokens % indexer.block_size
    scores = torch.nn.functional.pad(scores, (0, padding), value=float("-inf"))
    return scores.view(scores.shape[0], tokens, -1, indexer.block_size).amax(-1)


def block_gap(scores: torch.Tensor, chosen: np.ndarray, block: int, local: int) -> tuple[float, int]:
    """Smallest distance between the last block taken and the first left out, relative to the row's largest score, over
    the rows that leave a visible block out; and the number of those rows. Forced blocks compete with nobody.

    Raises when transformers' choice is not the one that the scores give, so the gap is a statement about its scores.
    """
    gap, rows = float("inf"), 0
    for head, token in np.ndindex(scores.shape[0], scores.shape[1]):
        row = scores[head, token].numpy()
        own = token // block
        forced = set(range(max(0, own - local + 1), own + 1))
        taken = set(chosen[head, token][chosen[head, token] >= 0].tolist())
        left = set(range(own + 1)) - taken
        if not forced <= taken or max(taken) > own:
            raise RuntimeError(f"head {head}, token {token}: forced or causal rule broken by {sorted(taken)}")
        if not left:
            continue
        rows += 1
        competing = taken - forced
        if not competing:
            continue
        difference = min(row[b] for b in competing) - max(row[b] for b in left)
        if not difference >= 0:
            raise RuntimeError(f"head {head}, token {token}: {sorted(taken)} is not the top of its scores")
        gap = min(gap, float(difference / np.abs(row[: own + 1]).max()))
    return gap, rows


class Recorder:
    """Hooks on a loaded model that fill a `Trace` and a `Coverage`."""

    def __init__(self, model: torch.nn.Module, case: Case, coverage: Coverage):
        self.case, self.coverage, self.trace = case, coverage, Trace()
        for name, module in model.named_modules():
            if isinstance(module, MiniMaxM3VLIndexer):
                module.register_forward_hook(self.on_indexer(layer_of(name)))
            elif isinstance(module, MiniMaxM3VLTopKRouter):
                module.register_forward_hook(self.on_router(layer_of(name)))
            elif isinstance(module, MiniMaxM3VLDenseMLP):
                module.gate_up_proj.register_forward_hook(
                    lambda _, __, out, limit=module.swiglu_limit: coverage.count_clamped(out, limit)
                )
            elif isinstance(module, MiniMaxM3VLExperts):
                module._apply_gate = self.counted(module)

    def counted(self, experts: MiniMaxM3VLExperts):
        """The experts' own gate function, counting what it clamps."""
        own = experts._apply_gate

        def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
            self.coverage.count_clamped(gate_up, experts.swiglu_limit)
            return own(gate_up)

        return apply_gate

    def on_indexer(self, layer: int):
        """Hook: block ids ascending with a -1 tail, and the gap at the cut."""

        def hook(module, args, out):
            hidden, cos_sin = args[0], args[1]
            ids = out[0].numpy().astype(np.int64)
            ids = np.sort(np.where(ids < 0, np.iinfo(np.int64).max, ids), axis=-1)
            ids = np.where(ids == np.iinfo(np.int64).max, -1, ids).astype(np.int32)
            tail = self.case.topk_blocks - ids.shape[-1]
            ids = np.pad(ids, ((0, 0), (0, 0), (0, tail)), constant_values=-1)
            with torch.no_grad():
                scores = block_scores(module, hidden, cos_sin)
            gap, rows = block_gap(scores, ids, self.case.block, self.case.local_blocks)
            self.coverage.block_gap_relative_min = min(self.coverage.block_gap_relative_min, gap)
            self.coverage.rows_with_blocks_left_out += rows
            self.coverage.rows_of_sparse_layers += ids.shape[0] * ids.shape[1]
            self.trace.blocks[layer] = ids

        return hook

    def on_router(self, layer: int):
        """Hook: expert ids ascending with their weights, and the gap at the cut."""

        def hook(module, _, out):
            logits, weights, ids = (t.detach() for t in out)
            if not all(t.dtype == torch.float32 for t in (module.weight, module.e_score_correction_bias, logits)):
                raise RuntimeError(f"layer {layer}: the router did not run in fp32")
            ids, order = ids.sort(dim=-1)
            self.trace.experts[layer] = ids.numpy().astype(np.int32)
            self.trace.expert_weights[layer] = weights.gather(1, order).numpy()
            scores = logits.sigmoid()
            choice = (scores + module.e_score_correction_bias).sort(dim=-1, descending=True).values
            gap = (choice[:, module.top_k - 1] - choice[:, module.top_k]).min().item()
            self.coverage.expert_gap_min = min(self.coverage.expert_gap_min, gap)
            unbiased = scores.topk(module.top_k, dim=-1).indices.sort(dim=-1).values
            self.coverage.router_rows += len(ids)
            self.coverage.router_rows_changed_by_bias += int((unbiased != ids).any(-1).sum())

        return hook


def token_log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of each next token, [T - 1], at temperature 1, log-softmax in fp32."""
    return logits[:-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def packed(traces: list[Trace], field_name: str, axis: int) -> dict[int, np.ndarray]:
    """One field of every sequence, concatenated over tokens, by layer."""
    layers = getattr(traces[0], field_name)
    return {layer: np.concatenate([getattr(t, field_name)[layer] for t in traces], axis=axis) for layer in layers}


def sample_rows(total: int, count: int, seed: int) -> np.ndarray:
    """`count` of `total` indices, ascending, from a seed."""
    return np.sort(np.random.default_rng(seed).choice(total, min(count, total), replace=False)).astype(np.int32)


def released_gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Gradients under released names, split by transformers' own reverse conversion. The indexer gets none."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if "vision_tower" in name or "multi_modal_projector" in name or ".indexer." in name:
            if parameter.grad is not None:
                raise RuntimeError(f"{name}: a frozen tensor received a gradient")
            continue
        gradients[name] = parameter.grad
    return {name: grad.contiguous().numpy() for name, grad in revert_weight_conversion(model, gradients).items()}


def gradient_tensors(gradients: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """The recorded form: `grad.{name}`, or `grad_index.{name}` (flat, i32) with `grad_sample.{name}` where large."""
    tensors = {}
    for name, grad in gradients.items():
        if grad.size <= WHOLE_MAX:
            tensors[f"grad.{name}"] = grad
            continue
        index = sample_rows(grad.size, SAMPLE, seed)
        tensors[f"grad_index.{name}"] = index
        tensors[f"grad_sample.{name}"] = grad.reshape(-1)[index]
    return tensors


def norm(values: np.ndarray) -> float:
    """L2 norm, summed in f64."""
    return float(np.sqrt(np.square(values.astype(np.float64)).sum()))


def record(case: Case, directory: Path, seed: int, sequences: list[torch.Tensor]) -> tuple[dict, dict]:
    """Tensors and facts of one golden. Raises `NearTie` when a selection hangs on rounding."""
    coverage = Coverage()
    model = load(directory, torch.float32, experts_implementation="eager")
    recorder = Recorder(model, case, coverage)
    scored = sum(len(ids) - 1 for ids in sequences)
    traces, logits, log_probs = [], [], []
    for ids in sequences:
        recorder.trace = Trace()
        out = model(input_ids=ids[None], use_cache=False).logits[0]
        log_probs.append(token_log_probs(out, ids))
        (-log_probs[-1].sum() / scored).backward()
        logits.append(out.detach())
        traces.append(recorder.trace)
    if not coverage.expert_gap_min >= EXPERT_GAP_MIN or not coverage.block_gap_relative_min >= BLOCK_GAP_RELATIVE_MIN:
        raise NearTie(f"expert gap {coverage.expert_gap_min:.2e}, block gap {coverage.block_gap_relative_min:.2e}")

    gradients = released_gradients(model)
    experts = packed(traces, "experts", 0)
    coverage.experts_without_tokens = sum(case.experts - len(np.unique(ids)) for ids in experts.values())
    lengths = [len(ids) for ids in sequences]
    all_logits = torch.cat(logits).numpy()
    rows = sample_rows(len(all_logits), LOGIT_ROWS_SAMPLED, seed)
    log_probs = torch.cat(log_probs).detach()
    tensors = {
        "input_ids": torch.cat(sequences).numpy().astype(np.int32),
        "cu_seqlens": np.cumsum([0, *lengths]).astype(np.int32),
        "logprobs": log_probs.numpy(),
        "logprobs_bf16": bf16_log_probs(directory, sequences),
        "logits.last": np.stack([sequence[-1].numpy() for sequence in logits]),
        "logits.sample": all_logits[rows],
        "logits.sample_rows": rows,
        "rope.inv_freq": model.model.language_model.rotary_emb.inv_freq.numpy(),
        **{f"blocks.{layer}": ids for layer, ids in packed(traces, "blocks", 1).items()},
        **{f"experts.{layer}": ids for layer, ids in experts.items()},
        **{f"expert_weights.{layer}": w for layer, w in packed(traces, "expert_weights", 0).items()},
        **gradient_tensors(gradients, seed),
    }
    difference = np.abs(tensors["logprobs_bf16"] - tensors["logprobs"])
    norms = {name: norm(grad) for name, grad in sorted(gradients.items())}
    facts = {
        "mean_nll": float(-log_probs.double().mean()),
        "bf16_log_prob_error": {"mean": float(difference.mean()), "max": float(difference.max())},
        "total_grad_norm": float(np.sqrt(sum(n * n for n in norms.values()))),
        "coverage": {k: v if np.isfinite(v) else None for k, v in vars(coverage).items()},
        "grad_norms": norms,
    }
    return tensors, facts


def bf16_log_probs(directory: Path, sequences: list[torch.Tensor]) -> np.ndarray:
    """Log-probs of transformers' own bf16: eager attention, everything else its default (bf16 router and logits)."""
    model = load(directory, torch.bfloat16)
    with torch.no_grad():
        outs = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
    return torch.cat([token_log_probs(out, ids) for out, ids in zip(outs, sequences, strict=True)]).numpy()
