use m3_kernels::{Backend, Result, ops};
use m3_reference::ops::{grpo_loss, log_prob};
use m3_spec::dtype::DType;

use super::List;
use crate::lab::Lab;

pub(super) fn add<B: Backend>(list: &mut List<B>) {
    list.both("log_prob", "t70_v1200_h96", |lab| {
        score(lab, [70, 1200, 96], 1.0)
    });
    list.both("log_prob", "tempered_t90_v512_h64", |lab| {
        score(lab, [90, 512, 64], 0.8)
    });
    list.both("log_prob", "edge_t257_v16_h64", |lab| {
        score(lab, [257, 16, 64], 1.0)
    });
    list.one("grpo_loss", "n5000", DType::F32, |lab| loss(lab, 5000));
}

fn score<B: Backend>(
    lab: &mut Lab<'_, B>,
    [tokens, vocab, hidden]: [usize; 3],
    temperature: f32,
) -> Result<()> {
    let x = lab.normal("x", 1.0, [tokens, hidden])?;
    let w = lab.normal("w", 2.0 * (hidden as f64).powf(-0.5), [vocab, hidden])?;
    let d_log_prob = lab.normal_f32("d_log_prob", 1.0, [tokens])?;
    let mut targets = lab.integers("targets", vocab as u32, tokens);
    targets[tokens / 2] = -1;
    let device_targets = lab.ints(&targets, [tokens])?;
    let device_temperature = lab.given(vec![f64::from(temperature)], DType::F32, [1])?;
    let [log_probs, lse, entropy] = [(); 3].map(|()| lab.output(DType::F32, [tokens]));
    let (log_probs, lse, entropy) = (log_probs?, lse?, entropy?);
    let dx = lab.output(lab.storage, [tokens, hidden])?;
    let dw = lab.gradient([vocab, hidden])?;
    let forward = ops::LogProb {
        x: &x.device,
        weight: &w.device,
        targets: &device_targets,
        temperature: &device_temperature.device,
        log_prob: &log_probs,
        lse: &lse,
        entropy: &entropy,
    };
    lab.backend.log_prob(&lab.stream, &forward)?;
    let backward = ops::LogProbBackward {
        x: &x.device,
        weight: &w.device,
        targets: &device_targets,
        temperature: &device_temperature.device,
        lse: &lse,
        d_log_prob: &d_log_prob.device,
        dx: &dx,
        d_weight: &dw,
    };
    lab.backend.log_prob_backward(&lab.stream, &backward)?;

    let params = log_prob::Params {
        tokens,
        hidden,
        vocab,
        temperature: f64::from(temperature),
    };
    let inputs = log_prob::Inputs {
        params,
        x: &x.host,
        w: &w.host,
        targets: &targets,
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = log_prob::forward(&inputs, &rounding);
        let grads = log_prob::Grads {
            dlog_probs: &d_log_prob.host,
        };
        (
            log_prob::backward(&inputs, &output, &grads, &rounding),
            output,
        )
    });
    lab.judge("log_probs", &log_probs, exact.1.log_probs, twin.1.log_probs)?;
    lab.judge("entropy", &entropy, exact.1.entropy, twin.1.entropy)?;
    lab.judge("lse", &lse, exact.1.lse, twin.1.lse)?;
    lab.judge("dx", &dx, exact.0.dx, twin.0.dx)?;
    lab.judge("dw", &dw, exact.0.dw, twin.0.dw)
}

fn loss<B: Backend>(lab: &mut Lab<'_, B>, tokens: usize) -> Result<()> {
    let old = lab.normal_f32("old_log_prob", 1.0, [tokens])?;
    let step = lab.normal_f32("step", 0.3, [tokens])?;
    let moved = old
        .host
        .iter()
        .zip(&step.host)
        .map(|(old, step)| old + step)
        .collect();
    let new = lab.given(moved, DType::F32, [tokens])?;
    let advantage = lab.normal_f32("advantage", 1.0, [tokens])?;
    let masks = lab.integers("mask", 4, tokens);
    let weights = masks
        .iter()
        .map(|&draw| if draw == 0 { 0.0 } else { 1.0 / tokens as f64 });
    let weight = lab.given(weights.collect(), DType::F32, [tokens])?;
    let loss = lab.output(DType::F32, [1])?;
    let stats = lab.output(DType::F32, [2])?;
    let d_log_prob = lab.output(DType::F32, [tokens])?;
    let (eps_low, eps_high) = (0.2f32, 0.28f32);
    let args = ops::GrpoLoss {
        log_prob: &new.device,
        old_log_prob: &old.device,
        advantage: &advantage.device,
        weight: &weight.device,
        loss: &loss,
        d_log_prob: &d_log_prob,
        stats: &stats,
        eps_low,
        eps_high,
    };
    lab.backend.grpo_loss(&lab.stream, &args)?;

    let params = grpo_loss::Params {
        clip_low: f64::from(eps_low),
        clip_high: f64::from(eps_high),
        dual_clip: None,
    };
    let inputs = grpo_loss::Inputs {
        params,
        log_probs: &new.host,
        old_log_probs: &old.host,
        advantages: &advantage.host,
        weights: &weight.host,
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = grpo_loss::forward(&inputs, &rounding);
        let grads = grpo_loss::Grads { dloss: 1.0 };
        (
            grpo_loss::backward(&inputs, &output, &grads, &rounding).dlog_probs,
            output,
        )
    });
    lab.judge("loss", &loss, vec![exact.1.loss], vec![twin.1.loss])?;
    let [ppo_kl, clipfrac] = [stats.slice(0, 0..1), stats.slice(0, 1..2)];
    lab.judge("ppo_kl", &ppo_kl, vec![exact.1.ppo_kl], vec![twin.1.ppo_kl])?;
    lab.judge(
        "clipfrac",
        &clipfrac,
        vec![exact.1.clipfrac],
        vec![twin.1.clipfrac],
    )?;
    lab.judge("dlog_probs", &d_log_prob, exact.0, twin.0)
}
