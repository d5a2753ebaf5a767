//! Faults of embedding, products, norms, rotation and activation.

use super::plant::{
    STREAM, Tensor, after, bf16, both, edit, edited, exchange, made, moved, plant, reorder,
    scratch, settings, sigmoid, store, values,
};
use super::{Fault, fault};
use m3_kernels::cpu::CpuBackend;
use m3_kernels::{Backend, Result, ops};
use m3_spec::dtype::DType;

const EMBEDDING: &[&str] = &["embedding::*"];
const LINEAR: &[&str] = &["linear::*/m97_*"];
const RMS_NORM: &[&str] = &["rms_norm::*/t67_h200"];
const ROPE: &[&str] = &["qk_norm_rope::*/h3_d64_r32"];
const SWIGLU: &[&str] = &["swigluoai::*"];

pub(super) fn faults() -> Vec<Fault> {
    [embedding(), linear(), rms_norm(), rope(), activation()]
        .into_iter()
        .flatten()
        .collect()
}

fn embedding() -> Vec<Fault> {
    vec![
        fault(
            "embedding: rows read one id too early",
            EMBEDDING,
            exchange!(Embedding {
                ids: |b, args| edited(b, args.ids, |_, x| (x - 1.0).max(0.0))
            }),
        ),
        fault(
            "embedding: scaled by the root of the hidden size",
            EMBEDDING,
            after!(Embedding.out, |args| |_, x| x
                * (args.out.shape()[1] as f64).sqrt()),
        ),
        fault(
            "embedding: a repeated token's gradient overwritten instead of summed",
            EMBEDDING,
            plant!(EmbeddingBackward, |b, args| overwrite_rows(b, args)),
        ),
    ]
}

fn overwrite_rows(b: &CpuBackend, args: &ops::EmbeddingBackward<'_, CpuBackend>) -> Result<()> {
    let (ids, rows) = (values(b, args.ids)?, values(b, args.d_out)?);
    let width = args.d_table.shape()[1];
    let mut table = values(b, args.d_table)?;
    for (&id, row) in ids.iter().zip(rows.chunks_exact(width)) {
        table[id as usize * width..][..width].copy_from_slice(row);
    }
    store(b, args.d_table, &table)
}

fn linear() -> Vec<Fault> {
    vec![
        fault(
            "product: rows beyond the last whole tile of 32 not written",
            LINEAR,
            plant!(Gemm, |b, args| {
                let rows = args.c.shape()[0] / 32 * 32;
                let (a, c) = (&args.a.slice(0, 0..rows), &args.c.slice(0, 0..rows));
                b.gemm(&STREAM, &ops::Gemm { a, c, ..*args })
            }),
        ),
        fault(
            "product: channels beyond the last whole tile of 64 not summed",
            LINEAR,
            plant!(Gemm, |b, args| {
                let channels = args.b.shape()[0] / 64 * 64;
                let (a, bb) = (&args.a.slice(1, 0..channels), &args.b.slice(0, 0..channels));
                b.gemm(&STREAM, &ops::Gemm { a, b: bb, ..*args })
            }),
        ),
        fault(
            "product: partial sums of 64 channels kept in bf16",
            &["linear::*/m33_n200_k1100"],
            plant!(Gemm, |b, args| partial_sums(b, args)),
        ),
        fault(
            "product: one element is NaN",
            LINEAR,
            after!(Gemm.c, |_args| |i, x| if i == 77 { f64::NAN } else { x }),
        ),
        fault(
            "product: two output channels exchanged",
            LINEAR,
            plant!(Gemm, |b, args| {
                b.gemm(&STREAM, args)?;
                reorder(b, args.c, |i| if i < 2 { 1 - i } else { i })
            }),
        ),
        fault(
            "product: fp32 operands fed through bf16",
            &["linear::f32/m97_*"],
            exchange!(Gemm {
                a: |b, args| edited(b, args.a, |_, x| bf16(x))
            }),
        ),
        fault(
            "product: the gradient of an earlier micro-batch overwritten instead of added to",
            LINEAR,
            settings!(Gemm {
                accumulate: |_args| false
            }),
        ),
    ]
}

fn partial_sums(b: &CpuBackend, args: &ops::Gemm<'_, CpuBackend>) -> Result<()> {
    let channels = args.b.shape()[0];
    if args.accumulate {
        return b.gemm(&STREAM, args);
    }
    let mut sum = vec![0.0; args.c.elements()];
    for start in (0..channels).step_by(64) {
        let range = start..(start + 64).min(channels);
        let part = scratch(b, args.c)?;
        let (a, weight) = (&args.a.slice(1, range.clone()), &args.b.slice(0, range));
        b.gemm(
            &STREAM,
            &ops::Gemm {
                a,
                b: weight,
                c: &part,
                ..*args
            },
        )?;
        for (sum, part) in sum.iter_mut().zip(values(b, &part)?) {
            *sum = bf16(*sum + part);
        }
    }
    store(b, args.c, &sum)
}

/// The weight of a norm, forward and backward.
macro_rules! norm_weight {
    ($forward:ident, $backward:ident, $change:expr) => {
        both(
            exchange!($forward {
                weight: |b, args| edited(b, args.weight, $change)
            }),
            exchange!($backward {
                weight: |b, args| edited(b, args.weight, $change)
            }),
        )
    };
}

fn rms_norm() -> Vec<Fault> {
    vec![
        fault(
            "norm: +1 missing",
            RMS_NORM,
            norm_weight!(RmsNorm, RmsNormBackward, |_, w| w - 1.0),
        ),
        fault(
            "norm: +1 twice",
            RMS_NORM,
            norm_weight!(RmsNorm, RmsNormBackward, |_, w| w + 1.0),
        ),
        fault(
            "norm: +1 folded into the bf16 weight",
            &["rms_norm::*/halfway_*"],
            norm_weight!(RmsNorm, RmsNormBackward, |_, w| bf16(1.0 + w) - 1.0),
        ),
        fault(
            "norm: epsilon of 1e-5",
            &["rms_norm::f32/small_*"],
            settings!(RmsNorm {
                eps: |args| 10.0 * args.eps
            }),
        ),
        fault(
            "norm: reads the residual before the sum",
            RMS_NORM,
            plant!(RmsNorm, |b, args| {
                b.rms_norm(&STREAM, args)?;
                let unadded = ops::RmsNorm {
                    y: None,
                    residual_out: None,
                    ..*args
                };
                b.rms_norm(&STREAM, &unadded)
            }),
        ),
        fault(
            "norm: gradient of the residual branch dropped",
            RMS_NORM,
            settings!(RmsNormBackward {
                d_residual_in: |_args| None
            }),
        ),
        fault(
            "norm: gradient without the projection on the normalised row",
            RMS_NORM,
            plant!(RmsNormBackward, |b, args| unprojected(b, args)),
        ),
        fault(
            "norm: root mean square of the whole pack",
            RMS_NORM,
            plant!(RmsNorm, |b, args| {
                b.rms_norm(&STREAM, args)?;
                let first = values(b, args.rstd)?[0];
                let own = values(b, args.rstd)?;
                let width = args.out.shape()[1];
                edit(b, args.out, |i, x| x * first / own[i / width])
            }),
        ),
        fault(
            "norm: the last row not written",
            RMS_NORM,
            after!(RmsNorm.out, |args| |i, x| {
                if i / args.out.shape()[1] + 1 == args.out.shape()[0] {
                    f64::NAN
                } else {
                    x
                }
            }),
        ),
        fault(
            "norm: the residual sum rounded towards zero",
            &["rms_norm::bf16/t67_h200"],
            plant!(RmsNorm, |b, args| {
                b.rms_norm(&STREAM, args)?;
                let (Some(y), Some(sum)) = (args.y, args.residual_out) else {
                    return Ok(());
                };
                let (x, y) = (values(b, args.residual)?, values(b, y)?);
                edit(b, sum, |i, _| truncated(x[i] + y[i]))
            }),
        ),
    ]
}

fn truncated(x: f64) -> f64 {
    f64::from(f32::from_bits((x as f32).to_bits() & 0xffff_0000))
}

fn unprojected(b: &CpuBackend, args: &ops::RmsNormBackward<'_, CpuBackend>) -> Result<()> {
    b.rms_norm_backward(&STREAM, args)?;
    let (rstd, weight) = (values(b, args.rstd)?, values(b, args.weight)?);
    let d_out = values(b, args.d_out)?;
    let passed = match args.d_residual_in {
        Some(passed) => values(b, passed)?,
        None => vec![0.0; d_out.len()],
    };
    let width = weight.len();
    edit(b, args.d_residual, |i, _| {
        passed[i] + rstd[i / width] * (1.0 + weight[i % width]) * d_out[i]
    })
}

/// The rotary table of both directions, from a pair's number, the angle of position 1 and the widths of table and head.
fn table(b: &CpuBackend, cos_sin: &Tensor, angle: impl Fn(usize, f64) -> f64) -> Result<Tensor> {
    let old = values(b, cos_sin)?;
    let half = cos_sin.shape()[1];
    edited(b, cos_sin, |i, _| {
        let (position, pair) = (i / (2 * half), i / 2 % half);
        let first = &old[2 * (half + pair)..];
        let angle = position as f64 * angle(pair, first[1].atan2(first[0]));
        if i % 2 == 0 { angle.cos() } else { angle.sin() }
    })
}

macro_rules! rotary_table {
    (|$args:ident, $pair:ident, $angle:ident| $made:expr) => {
        both(
            exchange!(QkNormRope {
                cos_sin: |b, $args| table(b, $args.cos_sin, |$pair, $angle| $made)
            }),
            exchange!(QkNormRopeBackward {
                cos_sin: |b, $args| table(b, $args.cos_sin, |$pair, $angle| $made)
            }),
        )
    };
}

macro_rules! rotary_positions {
    ($change:expr) => {
        both(
            exchange!(QkNormRope {
                positions: |b, args| edited(b, args.positions, $change)
            }),
            exchange!(QkNormRopeBackward {
                positions: |b, args| edited(b, args.positions, $change)
            }),
        )
    };
}

fn rope() -> Vec<Fault> {
    vec![
        fault(
            "rotary: denominator is the head's width, not the rotary width",
            ROPE,
            rotary_table!(|args, _pair, angle| {
                let [rotary, head] = [2 * args.cos_sin.shape()[1], args.x.shape()[2]];
                angle.powf(rotary as f64 / head as f64)
            }),
        ),
        fault(
            "rotary: theta of 10,000",
            ROPE,
            rotary_table!(|args, pair, _angle| {
                1e4f64.powf(-(pair as f64) / args.cos_sin.shape()[1] as f64)
            }),
        ),
        fault(
            "rotary: theta of 1e7 in place of 5e6",
            ROPE,
            rotary_table!(|args, pair, _angle| {
                1e7f64.powf(-(pair as f64) / args.cos_sin.shape()[1] as f64)
            }),
        ),
        fault(
            "rotary: table in bf16",
            &["qk_norm_rope::f32/h3_d64_r32"],
            exchange!(QkNormRope {
                cos_sin: |b, args| edited(b, args.cos_sin, |_, x| bf16(x))
            }),
        ),
        fault(
            "rotary: neighbouring channels paired instead of halves",
            ROPE,
            plant!(QkNormRope, |b, args| interleaved(b, args)),
        ),
        fault(
            "rotary: positions counted from the pack's start",
            ROPE,
            rotary_positions!(|i, _| (i % 64) as f64),
        ),
        fault(
            "rotary: positions off by one",
            ROPE,
            rotary_positions!(|_, p| p + 1.0),
        ),
        fault(
            "rotary: the backward pass turns the same way as the forward pass",
            ROPE,
            exchange!(QkNormRopeBackward {
                cos_sin: |b, args| edited(b, args.cos_sin, |i, x| if i % 2 == 1 { -x } else { x })
            }),
        ),
        fault(
            "head norm: +1 missing",
            ROPE,
            norm_weight!(QkNormRope, QkNormRopeBackward, |_, w| w - 1.0),
        ),
        fault(
            "head norm: +1 folded into the bf16 weight",
            &["qk_norm_rope::*/halfway_*"],
            norm_weight!(QkNormRope, QkNormRopeBackward, |_, w| bf16(1.0 + w) - 1.0),
        ),
        fault(
            "head norm: two heads exchanged",
            ROPE,
            plant!(QkNormRope, |b, args| {
                b.qk_norm_rope(&STREAM, args)?;
                swap_heads(b, args.out)
            }),
        ),
    ]
}

/// The first two heads of every token exchanged.
pub(super) fn swap_heads(b: &CpuBackend, x: &Tensor) -> Result<()> {
    let (heads, width) = (x.shape()[1], x.shape()[2]);
    reorder(b, x, |i| match i / width % heads {
        0 => i + width,
        1 => i - width,
        _ => i,
    })
}

fn interleaved(b: &CpuBackend, args: &ops::QkNormRope<'_, CpuBackend>) -> Result<()> {
    let (width, half) = (args.x.shape()[2], args.cos_sin.shape()[1]);
    // Channel of the halves layout that holds channel i of the interleaved one.
    let to_pairs = move |i: usize| match i % width {
        c if c < half => i - c + 2 * c,
        c if c < 2 * half => i - c + 2 * (c - half) + 1,
        _ => i,
    };
    let from_pairs = move |i: usize| match i % width {
        c if c < 2 * half => i - c + c / 2 + (c % 2) * half,
        _ => i,
    };
    let (x, weight) = (
        moved(b, args.x, to_pairs)?,
        moved(b, args.weight, to_pairs)?,
    );
    b.qk_norm_rope(
        &STREAM,
        &ops::QkNormRope {
            x: &x,
            weight: &weight,
            ..*args
        },
    )?;
    reorder(b, args.out, from_pairs)
}

/// The activation by another formula.
fn formula(
    b: &CpuBackend,
    args: &ops::Swigluoai<'_, CpuBackend>,
    of: impl Fn(f64, f64, f64, f64) -> f64,
) -> Result<()> {
    let (gate, up) = (values(b, args.gate)?, values(b, args.up)?);
    let (alpha, limit) = (f64::from(args.alpha), f64::from(args.limit));
    edit(b, args.out, |i, _| of(gate[i], up[i], alpha, limit))
}

fn activation() -> Vec<Fault> {
    vec![
        fault(
            "activation: gate clamped on both sides",
            &["swigluoai::*/limit1_*"],
            exchange!(Swigluoai {
                gate: |b, args| edited(b, args.gate, |_, x| x.max(-f64::from(args.limit)))
            }),
        ),
        fault(
            "activation: up clamped from above only",
            SWIGLU,
            plant!(Swigluoai, |b, args| formula(
                b,
                args,
                |gate, up, alpha, limit| {
                    let gate = gate.min(limit);
                    gate * sigmoid(alpha * gate) * (up.min(limit) + 1.0)
                }
            )),
        ),
        fault(
            "activation: +1 on up missing",
            SWIGLU,
            plant!(Swigluoai, |b, args| formula(
                b,
                args,
                |gate, up, alpha, limit| {
                    let gate = gate.min(limit);
                    gate * sigmoid(alpha * gate) * up.clamp(-limit, limit)
                }
            )),
        ),
        fault(
            "activation: alpha of 1",
            SWIGLU,
            settings!(Swigluoai { alpha: |_args| 1.0 }),
        ),
        fault(
            "activation: no clamp",
            SWIGLU,
            settings!(Swigluoai { limit: |_args| 1e9 }),
        ),
        fault(
            "activation: w1 and w3 swapped",
            SWIGLU,
            settings!(Swigluoai {
                gate: |args| args.up,
                up: |args| args.gate
            }),
        ),
        fault(
            "activation: FC1 halves read interleaved",
            SWIGLU,
            plant!(Swigluoai, |b, args| interleaved_halves(b, args)),
        ),
        fault(
            "activation: gradient passes through the clamp",
            SWIGLU,
            plant!(SwigluoaiBackward, |b, args| through_the_clamp(b, args)),
        ),
        fault(
            "activation: gradients of gate and up exchanged",
            SWIGLU,
            settings!(SwigluoaiBackward {
                d_gate: |args| args.d_up,
                d_up: |args| args.d_gate
            }),
        ),
    ]
}

fn interleaved_halves(b: &CpuBackend, args: &ops::Swigluoai<'_, CpuBackend>) -> Result<()> {
    let (gate, up) = (values(b, args.gate)?, values(b, args.up)?);
    let width = args.gate.shape()[1];
    let pick = |i: usize, odd: usize| {
        let (row, at) = (i / width * width, 2 * (i % width) + odd);
        if at < width {
            gate[row + at]
        } else {
            up[row + at - width]
        }
    };
    let of = |odd| (0..gate.len()).map(|i| pick(i, odd)).collect::<Vec<f64>>();
    let dtype: DType = args.gate.dtype();
    let (first, second) = (
        made(b, args.gate, dtype, &of(0))?,
        made(b, args.up, dtype, &of(1))?,
    );
    b.swigluoai(
        &STREAM,
        &ops::Swigluoai {
            gate: &first,
            up: &second,
            ..*args
        },
    )
}

fn through_the_clamp(b: &CpuBackend, args: &ops::SwigluoaiBackward<'_, CpuBackend>) -> Result<()> {
    let limit = f64::from(args.limit);
    let gate = &edited(b, args.gate, |_, x| x.min(limit))?;
    let up = &edited(b, args.up, |_, x| x.clamp(-limit, limit))?;
    b.swigluoai_backward(
        &STREAM,
        &ops::SwigluoaiBackward {
            gate,
            up,
            limit: 1e9,
            ..*args
        },
    )
}
