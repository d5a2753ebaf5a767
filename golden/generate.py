#!/usr/bin/env python3
"""Writes the goldens: released-format checkpoints and what Hugging Face transformers computes from them.

    python golden/generate.py            # write checkpoints/, transformers/ and manifest.json beside this file
    python golden/generate.py --check    # regenerate elsewhere and compare with the committed files

Versions are pinned in requirements.txt; others are refused. No network is used.
"""

import argparse
import datetime
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}

import numpy as np
import safetensors
import torch
import transformers
from safetensors.numpy import load_file, save_file

from cases import CASES, Case
from model import build, load, write
from record import BLOCK_GAP_RELATIVE_MIN, EXPERT_GAP_MIN, NearTie, record

GENERATOR_VERSION = 1
SEEDS_TRIED_MAX = 50
HERE = Path(__file__).resolve().parent

# Another CPU may sum in another order. Integers and checkpoints are compared exactly; floats with these bounds, each
# well inside the bound of the gate that reads the tensor (log-prob 1e-4, logits 1e-3, weights 1e-5, gradients 1e-3).
CHECK_BOUNDS = {"logprobs": 2e-5, "logits": 2e-4, "expert_weights": 2e-6, "rope": 0.0}
CHECK_BOUND_GRADIENT_RELATIVE = 2e-4
# bf16 results depend on the CPU's bf16 matrix kernels: one rounding may move a log-prob by a few hundredths.
CHECK_BOUND_BF16_MEAN = 2e-2


def versions() -> dict[str, str]:
    """Versions of the libraries in use."""
    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "numpy": np.__version__,
    }


def require_pins() -> None:
    """Refuses to run under other versions than requirements.txt names."""
    pins = dict(line.split("==") for line in (HERE / "requirements.txt").read_text().split())
    if pins != versions():
        sys.exit(f"golden: versions {versions()} differ from requirements.txt {pins}; install the pinned ones")


def token_sequences(case: Case, seed: int) -> list[torch.Tensor]:
    """Uniform token ids of the case's lengths."""
    stream = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, 1])))
    return [torch.from_numpy(stream.integers(0, case.vocab, length)) for length in case.lengths]


def require_same_weights(model: torch.nn.Module, case: Case, root: Path) -> None:
    """Every storage read back equals the model bit for bit, F32 classes included."""
    for storage in case.storages:
        read = load(root / storage.directory, torch.float32).state_dict()
        expected = model.state_dict()
        different = [n for n in expected if not torch.equal(read[n], expected[n])]
        if different or read.keys() != expected.keys():
            raise RuntimeError(f"{storage.directory}: does not read back as written: {different}")


def generate_case(case: Case, out: Path) -> dict:
    """Writes one golden; returns its manifest entry. Seeds that leave a selection to rounding are passed over."""
    refused = []
    for seed in range(case.seed, case.seed + SEEDS_TRIED_MAX):
        model = build(case, seed)
        checkpoints = out / "checkpoints"
        for storage in case.storages:
            write(model, case, storage, checkpoints)
        require_same_weights(model, case, checkpoints)
        sequences = token_sequences(case, seed)
        try:
            tensors, facts = record(case, checkpoints / case.storages[0].directory, seed, sequences)
        except NearTie as reason:
            refused.append({"seed": seed, "reason": str(reason)})
            continue
        break
    else:
        raise RuntimeError(f"{case.name}: every seed leaves a selection to rounding: {refused}")

    directory = out / "transformers"
    directory.mkdir(exist_ok=True)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, directory / f"{case.name}.safetensors")
    ids = [sequence.tolist() for sequence in sequences]
    tokens = {"input_ids": ids[0]} if len(ids) == 1 else {"sequences": ids}
    (directory / f"{case.name}.tokens.json").write_text(json.dumps(tokens) + "\n")
    entry = {
        "reason": case.reason,
        "seed": seed,
        "seeds_refused": refused,
        "lengths": list(case.lengths),
        "checkpoints": {s.directory: {"schema": s.schema, "dtype": s.dtype, "shards": s.shards} for s in case.storages},
        **facts,
    }
    (directory / f"{case.name}.json").write_text(json.dumps(entry, indent=2) + "\n")
    return {key: value for key, value in entry.items() if key != "grad_norms"}


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def golden_files(root: Path) -> list[str]:
    """Paths, relative to `root`, of all recorded files."""
    found = [p for part in ("checkpoints", "transformers") for p in (root / part).rglob("*") if p.is_file()]
    return sorted(str(p.relative_to(root)) for p in found)


def generate(out: Path) -> dict:
    """Writes every golden under `out` and returns the manifest."""
    for part in ("checkpoints", "transformers"):
        shutil.rmtree(out / part, ignore_errors=True)
    goldens = {}
    for case in CASES:
        goldens[case.name] = generate_case(case, out)
        coverage = goldens[case.name]["coverage"]
        print(f"{case.name}: seed {goldens[case.name]['seed']}, {coverage}", flush=True)
    manifest = {
        "generator": "golden/generate.py",
        "generator_version": GENERATOR_VERSION,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "class": "transformers.models.minimax_m3_vl.MiniMaxM3SparseForConditionalGeneration",
        "attention": "eager",
        "compute": "float32, one thread",
        "seeds_refused_below": {"expert_gap": EXPERT_GAP_MIN, "block_gap_relative": BLOCK_GAP_RELATIVE_MIN},
        "goldens": goldens,
        "files": {
            name: {"bytes": (out / name).stat().st_size, "sha256": sha256(out / name)} for name in golden_files(out)
        },
    }
    return manifest


def tensor_fault(name: str, committed: np.ndarray, again: np.ndarray) -> str | None:
    """Why two recordings of a tensor disagree, or None."""
    if committed.shape != again.shape or committed.dtype != again.dtype:
        return f"{committed.dtype}{committed.shape} against {again.dtype}{again.shape}"
    if np.array_equal(committed, again):
        return None
    if committed.dtype.kind == "i":
        return f"{int((committed != again).sum())} ids differ"
    difference = np.abs(committed.astype(np.float64) - again)
    if name.startswith("grad"):
        error = np.linalg.norm(difference) / np.linalg.norm(committed.astype(np.float64))
        bound = CHECK_BOUND_GRADIENT_RELATIVE
    elif name == "logprobs_bf16":
        error, bound = difference.mean(), CHECK_BOUND_BF16_MEAN
    else:
        error, bound = difference.max(), CHECK_BOUNDS[name.split(".")[0]]
    return None if error <= bound else f"differs by {error:.3e}, bound {bound:.1e}"


def file_faults(name: str, committed: Path, again: Path) -> list[str]:
    """Why a committed file and its regeneration disagree. Records may differ within bounds, everything else may not."""
    if name.startswith("transformers/") and name.endswith(".safetensors"):
        left, right = load_file(committed / name), load_file(again / name)
        if left.keys() != right.keys():
            return [f"{name}: tensors differ: {sorted(left.keys() ^ right.keys())}"]
        faults = {tensor: tensor_fault(tensor, left[tensor], right[tensor]) for tensor in left}
        return [f"{name}: {tensor}: {fault}" for tensor, fault in faults.items() if fault]
    if name.startswith("transformers/") and not name.endswith(".tokens.json"):
        left, right = (json.loads((root / name).read_text()) for root in (committed, again))
        exact = ("reason", "seed", "lengths", "checkpoints")
        faults = [f"{name}: {key} differs" for key in exact if left[key] != right[key]]
        if left["grad_norms"].keys() != right["grad_norms"].keys():
            return [*faults, f"{name}: other tensors have gradients"]
        bound = CHECK_BOUND_GRADIENT_RELATIVE
        norms = {tensor: (value, right["grad_norms"][tensor]) for tensor, value in left["grad_norms"].items()}
        return faults + [
            f"{name}: norm of {n}: {a} against {b}" for n, (a, b) in norms.items() if not abs(a - b) <= bound * a
        ]
    return [f"{name}: bytes differ"]


def check() -> int:
    """Compares the committed files with their manifest and with a fresh generation; prints what differs."""
    manifest = json.loads((HERE / "manifest.json").read_text())
    recorded = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    faults = [f"{name}: absent from the manifest" for name in golden_files(HERE) if name not in recorded]
    faults += [f"{name}: missing" for name in recorded if not (HERE / name).is_file()]
    faults += [
        f"{n}: not the file of the manifest"
        for n, sha in recorded.items()
        if (HERE / n).is_file() and sha256(HERE / n) != sha
    ]
    identical = 0
    with tempfile.TemporaryDirectory() as scratch:
        again = generate(Path(scratch))
        if again["files"].keys() != recorded.keys():
            faults.append(f"other files are generated: {sorted(again['files'].keys() ^ recorded.keys())}")
        for name in recorded.keys() & again["files"].keys():
            if again["files"][name]["sha256"] == recorded[name]:
                identical += 1
            elif (HERE / name).is_file():
                faults += file_faults(name, HERE, Path(scratch))
    print(*sorted(faults), f"{identical} of {len(recorded)} files identical, {len(faults)} faults", sep="\n")
    return int(bool(faults))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the committed files with a fresh generation")
    arguments = parser.parse_args()
    require_pins()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    if arguments.check:
        return check()
    manifest = generate(HERE)
    (HERE / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    print(f"{len(manifest['files'])} files, {total / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
