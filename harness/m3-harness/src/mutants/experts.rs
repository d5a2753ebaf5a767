//! Faults of router, permutation, grouped products and combination.

use std::sync::Mutex;

use super::plant::{
    Plant, STREAM, after, bf16, both, edit, edited, exchange, ints, moved, plant, reorder, rolled,
    scratch, settings, sigmoid, store, values,
};
use super::{Fault, fault};
use m3_kernels::cpu::CpuBackend;
use m3_kernels::cpu::fault::Call;
use m3_kernels::{Backend, Result, ops};

const ROUTER: &[&str] = &["router::f32/e128_k4"];
const ROUTER_TIES: &[&str] = &["router::f32/saturated_ties"];
const PERMUTE: &[&str] = &["moe_permute::*/e8_k2"];
const COMBINE: &[&str] = &["moe_combine::*/e128_k4"];
const GROUPED: &[&str] = &["grouped_gemm::*/e8_uneven"];

pub(super) fn faults() -> Vec<Fault> {
    [router(), permute(), grouped(), combine()]
        .into_iter()
        .flatten()
        .collect()
}

/// Weights of the chosen experts by another formula of their logits.
fn weights(
    b: &CpuBackend,
    args: &ops::RouterWeights<'_, CpuBackend>,
    of: impl Fn(&[f64], &[usize]) -> Vec<f64>,
) -> Result<()> {
    let (logits, ids) = (values(b, args.logits)?, ints(b, args.expert_ids)?);
    let (experts, topk) = (args.logits.shape()[1], args.expert_ids.shape()[1]);
    let rows = logits.chunks_exact(experts).zip(ids.chunks_exact(topk));
    let weights: Vec<f64> = rows
        .flat_map(|(logits, ids)| {
            let ids: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
            let chosen: Vec<f64> = ids.iter().map(|&id| logits[id]).collect();
            of(&chosen, &ids)
        })
        .collect();
    store(b, args.weights, &weights)
}

fn normalised(scores: Vec<f64>) -> Vec<f64> {
    let sum: f64 = scores.iter().sum();
    scores.into_iter().map(|score| score / sum).collect()
}

/// The bias that the selection was given, added to the scores that the weights are made of.
fn bias_in_weights() -> Plant {
    let bias = Mutex::new(Vec::new());
    std::sync::Arc::new(move |b: &CpuBackend, call: Call<'_>| {
        let mut bias = bias
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        match call {
            Call::RouterSelect(args) => {
                *bias = values(b, args.bias)?;
                call.run(b)
            }
            Call::RouterWeights(args) => weights(b, args, |logits, ids| {
                let scores = logits
                    .iter()
                    .zip(ids)
                    .map(|(&x, &id)| sigmoid(x) + bias[id]);
                normalised(scores.collect())
            }),
            other => other.run(b),
        }
    })
}

fn router() -> Vec<Fault> {
    vec![
        fault(
            "router: chosen without the bias",
            ROUTER,
            exchange!(RouterSelect {
                bias: |b, args| edited(b, args.bias, |_, _| 0.0)
            }),
        ),
        fault("router: bias in the weights", ROUTER, bias_in_weights()),
        fault(
            "router: logits in bf16",
            ROUTER,
            both(
                exchange!(RouterSelect {
                    logits: |b, args| edited(b, args.logits, |_, x| bf16(x))
                }),
                exchange!(RouterWeights {
                    logits: |b, args| edited(b, args.logits, |_, x| bf16(x))
                }),
            ),
        ),
        fault(
            "router: softmax in place of sigmoid",
            ROUTER,
            plant!(RouterWeights, |b, args| weights(b, args, |logits, _| {
                normalised(logits.iter().map(|x| x.exp()).collect())
            })),
        ),
        fault(
            "router: weights not normalised",
            ROUTER,
            plant!(RouterWeights, |b, args| weights(b, args, |logits, _| {
                logits.iter().map(|&x| sigmoid(x)).collect()
            })),
        ),
        fault(
            "router: ids not ascending",
            ROUTER,
            plant!(RouterSelect, |b, args| {
                b.router_select(&STREAM, args)?;
                let topk = args.expert_ids.shape()[1];
                reorder(b, args.expert_ids, |i| i - i % topk + topk - 1 - i % topk)
            }),
        ),
        fault(
            "router: ties go to the higher expert",
            ROUTER_TIES,
            plant!(RouterSelect, |b, args| {
                let experts = args.logits.shape()[1];
                let mirrored = |i: usize| i - i % experts + experts - 1 - i % experts;
                let (logits, bias) = (
                    moved(b, args.logits, mirrored)?,
                    moved(b, args.bias, mirrored)?,
                );
                let args = ops::RouterSelect {
                    logits: &logits,
                    bias: &bias,
                    ..*args
                };
                b.router_select(&STREAM, &args)?;
                let topk = args.expert_ids.shape()[1];
                reorder(b, args.expert_ids, |i| i - i % topk + topk - 1 - i % topk)?;
                edit(b, args.expert_ids, |_, id| experts as f64 - 1.0 - id)
            }),
        ),
        fault(
            "router: one route row shifted",
            ROUTER,
            exchange!(RouterWeights {
                expert_ids: |b, args| {
                    moved(
                        b,
                        args.expert_ids,
                        rolled(args.expert_ids, args.expert_ids.shape()[1], 1),
                    )
                }
            }),
        ),
        fault(
            "router: gradient without the normalisation",
            ROUTER,
            plant!(RouterBackward, |b, args| {
                b.router_backward(&STREAM, args)?;
                let (logits, ids) = (values(b, args.logits)?, ints(b, args.expert_ids)?);
                let gradients = values(b, args.d_weights)?;
                let (experts, topk) = (args.logits.shape()[1], args.expert_ids.shape()[1]);
                let mut d_logits = vec![0.0; logits.len()];
                for (slot, (&id, d)) in ids.iter().zip(gradients).enumerate() {
                    let row = slot / topk * experts;
                    let chosen = &ids[slot / topk * topk..][..topk];
                    let sum: f64 = chosen
                        .iter()
                        .map(|&id| sigmoid(logits[row + id as usize]))
                        .sum();
                    let s = sigmoid(logits[row + id as usize]);
                    d_logits[row + id as usize] = d * s * (1.0 - s) / sum;
                }
                store(b, args.d_logits, &d_logits)
            }),
        ),
        fault(
            "router: gradient in bf16",
            ROUTER,
            after!(RouterBackward.d_logits, |_args| |_, x| bf16(x)),
        ),
    ]
}

fn permute() -> Vec<Fault> {
    vec![
        fault(
            "permutation: two rows of an expert exchanged",
            PERMUTE,
            plant!(MoePlan, |b, args| {
                b.moe_plan(&STREAM, args)?;
                reorder(b, args.token_of_row, |i| if i < 2 { 1 - i } else { i })?;
                edit(
                    b,
                    args.row_of_slot,
                    |_, row| if row < 2.0 { 1.0 - row } else { row },
                )
            }),
        ),
        fault(
            "permutation: the end of the last expert missing",
            PERMUTE,
            after!(MoePlan.expert_offsets, |args| |i, x| {
                if i + 1 == args.expert_offsets.elements() {
                    0.0
                } else {
                    x
                }
            }),
        ),
        fault(
            "permutation: rows taken in token order",
            PERMUTE,
            exchange!(MoePermute {
                token_of_row: |b, args| {
                    let topk = args.token_of_row.elements() / args.x.shape()[0];
                    edited(b, args.token_of_row, |i, _| (i / topk) as f64)
                }
            }),
        ),
        fault(
            "permutation: rows scaled on the way",
            PERMUTE,
            after!(MoePermute.out, |_args| |_, x| 1.01 * x),
        ),
        fault(
            "permutation: gradient of a token's first expert only",
            PERMUTE,
            plant!(MoePermuteBackward, |b, args| {
                let (rows, slots) = (values(b, args.d_rows)?, ints(b, args.row_of_slot)?);
                let (width, topk) = (args.dx.shape()[1], args.row_of_slot.shape()[1]);
                edit(b, args.dx, |i, x| {
                    x + rows[slots[i / width * topk] as usize * width + i % width]
                })
            }),
        ),
        fault(
            "permutation: gradient overwritten instead of added to",
            PERMUTE,
            plant!(MoePermuteBackward, |b, args| {
                edit(b, args.dx, |_, _| 0.0)?;
                b.moe_permute_backward(&STREAM, args)
            }),
        ),
        fault(
            "permutation: gradient sum in bf16",
            PERMUTE,
            after!(MoePermuteBackward.dx, |_args| |_, x| bf16(x)),
        ),
    ]
}

fn grouped() -> Vec<Fault> {
    vec![
        fault(
            "experts: boundaries off by one",
            GROUPED,
            exchange!(GroupedGemm {
                expert_offsets: |b, args| {
                    let last = args.expert_offsets.elements() - 1;
                    let total = values(b, args.expert_offsets)?[last];
                    edited(b, args.expert_offsets, |i, x| {
                        if i == 0 || i == last {
                            x
                        } else {
                            (x + 1.0).min(total)
                        }
                    })
                }
            }),
        ),
        fault(
            "experts: weights of the next expert",
            GROUPED,
            plant!(GroupedGemm, |b, args| {
                // Copied under the same strides, so that a transposed view stays one.
                let [experts, k, n] = [0, 1, 2].map(|axis| args.b.shape()[axis]);
                let weight = &moved(b, args.b, move |i| (i + k * n) % (experts * k * n))?;
                b.grouped_gemm(&STREAM, &ops::GroupedGemm { b: weight, ..*args })
            }),
        ),
        fault(
            "experts: rows beyond the last expert not written",
            GROUPED,
            plant!(GroupedGemm, |b, args| {
                b.grouped_gemm(&STREAM, args)?;
                let used = ints(b, args.expert_offsets)?.last().copied().unwrap_or(0) as usize;
                let width = args.c.shape()[1];
                edit(
                    b,
                    args.c,
                    |i, x| if i / width >= used { f64::NAN } else { x },
                )
            }),
        ),
        fault(
            "experts: channels beyond the last whole tile of 64 not summed",
            &["grouped_gemm::*/e3_k1100"],
            plant!(GroupedGemm, |b, args| {
                let kept = args.a.shape()[1] / 64 * 64;
                let (a, weight) = (&args.a.slice(1, 0..kept), &args.b.slice(1, 0..kept));
                b.grouped_gemm(
                    &STREAM,
                    &ops::GroupedGemm {
                        a,
                        b: weight,
                        ..*args
                    },
                )
            }),
        ),
        fault(
            "experts: weight gradient of one expert not written",
            GROUPED,
            plant!(GroupedGemmWeights, |b, args| {
                let before = values(b, args.dw)?;
                b.grouped_gemm_weights(&STREAM, args)?;
                let row = args.dw.elements() / args.dw.shape()[0];
                edit(b, args.dw, |i, x| if i / row == 3 { before[i] } else { x })
            }),
        ),
        fault(
            "experts: weight gradient of an earlier micro-batch overwritten",
            GROUPED,
            plant!(GroupedGemmWeights, |b, args| {
                edit(b, args.dw, |_, _| 0.0)?;
                b.grouped_gemm_weights(&STREAM, args)
            }),
        ),
        fault(
            "experts: weight gradient in bf16",
            GROUPED,
            after!(GroupedGemmWeights.dw, |_args| |_, x| bf16(x)),
        ),
    ]
}

fn combine() -> Vec<Fault> {
    vec![
        fault(
            "combination: scaling dropped",
            COMBINE,
            settings!(MoeCombine {
                scaling: |_args| 1.0
            }),
        ),
        fault(
            "combination: scaling on the shared expert too",
            COMBINE,
            plant!(MoeCombine, |b, args| {
                let Some(shared) = args.shared else {
                    return b.moe_combine(&STREAM, args);
                };
                let shared = &edited(b, shared, |_, x| x * f64::from(args.scaling))?;
                b.moe_combine(
                    &STREAM,
                    &ops::MoeCombine {
                        shared: Some(shared),
                        ..*args
                    },
                )
            }),
        ),
        fault(
            "combination: shared expert dropped",
            COMBINE,
            settings!(MoeCombine {
                shared: |_args| None
            }),
        ),
        fault(
            "combination: weights of two slots exchanged",
            COMBINE,
            exchange!(MoeCombine {
                weights: |b, args| {
                    let topk = args.weights.shape()[1];
                    moved(b, args.weights, move |i| match i % topk {
                        0 => i + 1,
                        1 => i - 1,
                        _ => i,
                    })
                }
            }),
        ),
        fault(
            "combination: one route row shifted",
            COMBINE,
            exchange!(MoeCombine {
                row_of_slot: |b, args| {
                    moved(
                        b,
                        args.row_of_slot,
                        rolled(args.row_of_slot, args.row_of_slot.shape()[1], 1),
                    )
                }
            }),
        ),
        fault(
            "combination: sum over experts rounded to bf16 before the shared expert",
            &["moe_combine::f32/e128_k4"],
            plant!(MoeCombine, |b, args| {
                let Some(shared) = args.shared else {
                    return b.moe_combine(&STREAM, args);
                };
                b.moe_combine(
                    &STREAM,
                    &ops::MoeCombine {
                        shared: None,
                        ..*args
                    },
                )?;
                let shared = values(b, shared)?;
                edit(b, args.out, |i, x| bf16(x) + shared[i])
            }),
        ),
        fault(
            "combination: last slot of a token left out",
            COMBINE,
            exchange!(MoeCombine {
                weights: |b, args| {
                    let topk = args.weights.shape()[1];
                    edited(
                        b,
                        args.weights,
                        |i, x| if i % topk + 1 == topk { 0.0 } else { x },
                    )
                }
            }),
        ),
        fault(
            "combination: scaling missing in the gradient of the rows",
            COMBINE,
            plant!(MoeCombineBackward, |b, args| {
                let d_weights = &scratch(b, args.d_weights)?;
                b.moe_combine_backward(&STREAM, args)?;
                let plain = ops::MoeCombineBackward {
                    scaling: 1.0,
                    d_weights,
                    ..*args
                };
                b.moe_combine_backward(&STREAM, &plain)
            }),
        ),
        fault(
            "combination: scaling missing in the gradient of the weights",
            COMBINE,
            after!(MoeCombineBackward.d_weights, |args| |_, x| x / f64::from(
                args.scaling
            )),
        ),
    ]
}
