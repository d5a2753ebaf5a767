//! Faults of log-probabilities, loss and optimizer.

use super::plant::{
    STREAM, after, bf16, edit, edited, exchange, made, moved, plant, rolled, settings, store,
    values,
};
use super::{Fault, fault};
use m3_kernels::cpu::CpuBackend;
use m3_kernels::{Backend, Result, ops};

const LOG_PROB: &[&str] = &["log_prob::*/t70_*"];
const TEMPERED: &[&str] = &["log_prob::*/tempered_*"];
const LOSS: &[&str] = &["grpo_loss::*"];
const FIRST: &[&str] = &["adamw::*/first_step"];
const DECAY: &[&str] = &["adamw::*/step7_decay"];

pub(super) fn faults() -> Vec<Fault> {
    [log_prob(), loss(), optimizer()]
        .into_iter()
        .flatten()
        .collect()
}

fn log_prob() -> Vec<Fault> {
    vec![
        fault(
            "log-prob: temperature missing in the score",
            TEMPERED,
            exchange!(LogProb {
                temperature: |b, args| edited(b, args.temperature, |_, _| 1.0)
            }),
        ),
        fault(
            "log-prob: temperature missing in the gradient",
            TEMPERED,
            exchange!(LogProbBackward {
                temperature: |b, args| edited(b, args.temperature, |_, _| 1.0)
            }),
        ),
        fault(
            "log-prob: gradient divided by the temperature twice",
            TEMPERED,
            plant!(LogProbBackward, |b, args| {
                b.log_prob_backward(&STREAM, args)?;
                let temperature = values(b, args.temperature)?[0];
                edit(b, args.dx, |_, x| x / temperature)
            }),
        ),
        fault(
            "log-prob: targets shifted by one token",
            LOG_PROB,
            exchange!(LogProb {
                targets: |b, args| moved(b, args.targets, rolled(args.targets, 1, 1))
            }),
        ),
        fault(
            "log-prob: a token without a target counted",
            LOG_PROB,
            exchange!(LogProbBackward {
                targets: |b, args| edited(b, args.targets, |_, x| x.max(0.0))
            }),
        ),
        fault(
            "log-prob: normaliser in base 2",
            LOG_PROB,
            after!(LogProb.lse, |_args| |_, x| x / std::f64::consts::LN_2),
        ),
        fault(
            "log-prob: sign of the entropy",
            LOG_PROB,
            after!(LogProb.entropy, |_args| |_, x| -x),
        ),
        fault(
            "log-prob: hidden state in bf16 before the head",
            &["log_prob::f32/t70_*"],
            exchange!(LogProb {
                x: |b, args| edited(b, args.x, |_, x| bf16(x))
            }),
        ),
        fault(
            "log-prob: kept in bf16",
            LOG_PROB,
            after!(LogProb.log_prob, |_args| |_, x| bf16(x)),
        ),
        fault(
            "log-prob: vocabulary beyond the last whole tile of 128 not in the normaliser",
            LOG_PROB,
            plant!(LogProb, |b, args| short_vocabulary(b, args)),
        ),
        fault(
            "log-prob: one tile of the head's gradient not written",
            LOG_PROB,
            plant!(LogProbBackward, |b, args| {
                let before = values(b, args.d_weight)?;
                b.log_prob_backward(&STREAM, args)?;
                let tile = 128 * args.d_weight.shape()[1];
                edit(
                    b,
                    args.d_weight,
                    |i, x| if i < tile { before[i] } else { x },
                )
            }),
        ),
    ]
}

fn short_vocabulary(b: &CpuBackend, args: &ops::LogProb<'_, CpuBackend>) -> Result<()> {
    let kept = args.weight.shape()[0] / 128 * 128;
    let weight = &args.weight.slice(0, 0..kept);
    let targets = &edited(b, args.targets, |_, x| x.min(kept as f64 - 1.0))?;
    b.log_prob(
        &STREAM,
        &ops::LogProb {
            weight,
            targets,
            ..*args
        },
    )
}

fn loss() -> Vec<Fault> {
    vec![
        fault(
            "loss: clip bounds exchanged",
            LOSS,
            settings!(GrpoLoss {
                eps_low: |args| args.eps_high,
                eps_high: |args| args.eps_low
            }),
        ),
        fault(
            "loss: no clip",
            LOSS,
            settings!(GrpoLoss {
                eps_low: |_args| 1e9,
                eps_high: |_args| 1e9
            }),
        ),
        fault(
            "loss: ratio of old to new",
            LOSS,
            settings!(GrpoLoss {
                log_prob: |args| args.old_log_prob,
                old_log_prob: |args| args.log_prob
            }),
        ),
        fault(
            "loss: sign of the advantage",
            LOSS,
            exchange!(GrpoLoss {
                advantage: |b, args| edited(b, args.advantage, |_, x| -x)
            }),
        ),
        fault(
            "loss: masked tokens counted",
            LOSS,
            plant!(GrpoLoss, |b, args| {
                let largest = values(b, args.weight)?.into_iter().fold(0.0, f64::max);
                let weight = &edited(b, args.weight, |_, _| largest)?;
                b.grpo_loss(&STREAM, &ops::GrpoLoss { weight, ..*args })
            }),
        ),
        fault(
            "loss: advantages of the next token",
            LOSS,
            exchange!(GrpoLoss {
                advantage: |b, args| moved(b, args.advantage, rolled(args.advantage, 1, 1))
            }),
        ),
        fault(
            "loss: advantages divided by the biased deviation (ddof 0) of groups of 8",
            LOSS,
            exchange!(GrpoLoss {
                advantage: |b, args| edited(b, args.advantage, |_, x| x * (8f64 / 7.0).sqrt())
            }),
        ),
        fault(
            "loss: clipped tokens keep a gradient",
            LOSS,
            plant!(GrpoLoss, |b, args| {
                let open = ops::GrpoLoss {
                    eps_low: 1e9,
                    eps_high: 1e9,
                    ..*args
                };
                b.grpo_loss(&STREAM, &open)?;
                let gradient = values(b, args.d_log_prob)?;
                b.grpo_loss(&STREAM, args)?;
                store(b, args.d_log_prob, &gradient)
            }),
        ),
        fault(
            "loss: sign of the KL estimate",
            LOSS,
            after!(GrpoLoss.stats, |_args| |i, x| if i == 0 { -x } else { x }),
        ),
        fault(
            "loss: one clipped token not in the clip fraction",
            LOSS,
            after!(GrpoLoss.stats, |args| |i, x| {
                if i == 1 {
                    x - 1.0 / args.log_prob.elements() as f64
                } else {
                    x
                }
            }),
        ),
    ]
}

fn optimizer() -> Vec<Fault> {
    vec![
        fault(
            "optimizer: gradients not clipped",
            FIRST,
            exchange!(AdamW {
                coefficient: |b, args| edited(b, args.coefficient, |_, _| 1.0)
            }),
        ),
        fault(
            "optimizer: gradients below the limit scaled up to it",
            &["adamw::*/unclipped"],
            plant!(ClipCoefficient, |b, args| {
                b.clip_coefficient(&STREAM, args)?;
                let norm = values(b, args.norm)?[0];
                edit(b, args.coefficient, |_, _| f64::from(args.max_norm) / norm)
            }),
        ),
        fault(
            "optimizer: bias correction missing",
            FIRST,
            exchange!(AdamW {
                step: |b, args| edited(b, args.step, |_, _| 1e6)
            }),
        ),
        fault(
            "optimizer: bias correction one step late",
            DECAY,
            exchange!(AdamW {
                step: |b, args| edited(b, args.step, |_, x| x + 1.0)
            }),
        ),
        fault(
            "optimizer: weight decay added to the gradient",
            DECAY,
            plant!(AdamW, |b, args| {
                let (master, decay) = (values(b, args.master)?, f64::from(args.weight_decay));
                let grad = &edited(b, args.grad, |i, x| x + decay * master[i])?;
                b.adamw(
                    &STREAM,
                    &ops::AdamW {
                        grad,
                        weight_decay: 0.0,
                        ..*args
                    },
                )
            }),
        ),
        fault(
            "optimizer: betas exchanged",
            FIRST,
            settings!(AdamW {
                beta1: |args| args.beta2,
                beta2: |args| args.beta1
            }),
        ),
        fault(
            "optimizer: stored weights rounded towards zero",
            &["adamw::bf16/first_step"],
            plant!(AdamW, |b, args| {
                b.adamw(&STREAM, args)?;
                let master = values(b, args.master)?;
                let cut = |x: f64| f64::from(f32::from_bits((x as f32).to_bits() & 0xffff_0000));
                edit(b, args.param, |i, _| cut(master[i]))
            }),
        ),
        fault(
            "optimizer: stored weights not refreshed from the master",
            FIRST,
            plant!(AdamW, |b, args| {
                let master = values(b, args.master)?;
                b.adamw(&STREAM, args)?;
                store(b, args.param, &master)
            }),
        ),
        fault(
            "optimizer: master weights kept in bf16",
            FIRST,
            after!(AdamW.master, |_args| |_, x| bf16(x)),
        ),
        fault(
            "optimizer: second moment kept in bf16",
            FIRST,
            after!(AdamW.exp_avg_sq, |_args| |_, x| bf16(x)),
        ),
        fault(
            "optimizer: one shard's squares missing from the gradient norm",
            FIRST,
            plant!(SumSquares, |b, args| {
                let source = &args.source.slice(0, 0..args.source.elements() / 2);
                b.sum_squares(&STREAM, &ops::SumSquares { source, ..*args })
            }),
        ),
        fault(
            "optimizer: finite gradients called non-finite",
            FIRST,
            after!(ClipCoefficient.finite, |_args| |_, x| 1.0 - x),
        ),
        fault(
            "optimizer: an infinite element of the second moment",
            FIRST,
            plant!(AdamW, |b, args| {
                b.adamw(&STREAM, args)?;
                let values: Vec<f64> = values(b, args.exp_avg_sq)?;
                let made = made(b, args.exp_avg_sq, args.exp_avg_sq.dtype(), &values)?;
                edit(b, &made, |i, x| if i == 9 { f64::INFINITY } else { x })?;
                b.copy(
                    &STREAM,
                    &ops::Copy {
                        source: &made,
                        target: args.exp_avg_sq,
                    },
                )
            }),
        ),
    ]
}
