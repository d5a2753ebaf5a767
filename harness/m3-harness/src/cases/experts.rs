use m3_kernels::{Backend, Result, Tensor, ops};
use m3_reference::Precision;
use m3_reference::ops::{grouped_gemm, moe_combine, moe_permute, router};
use m3_spec::dtype::DType;

use super::List;
use crate::lab::Lab;

/// Tokens, experts and channels of a case.
#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    experts: usize,
    topk: usize,
    hidden: usize,
}

pub(super) fn add<B: Backend>(list: &mut List<B>) {
    let m3 = Shape {
        tokens: 1033,
        experts: 128,
        topk: 4,
        hidden: 40,
    };
    let tiny = Shape {
        tokens: 2049,
        experts: 8,
        topk: 2,
        hidden: 24,
    };
    for (variant, shape) in [("e128_k4", m3), ("e8_k2", tiny)] {
        list.one("router", variant, DType::F32, move |lab| {
            route(lab, shape, false)
        });
        list.both("moe_permute", variant, move |lab| permute(lab, shape));
        list.both("moe_combine", variant, move |lab| combine(lab, shape));
    }
    list.one("router", "saturated_ties", DType::F32, move |lab| {
        route(lab, m3, true)
    });
    list.both("grouped_gemm", "e8_uneven", |lab| {
        grouped(lab, &[70, 0, 1, 33, 0, 128, 5, 2], 72, 56)
    });
    list.both("grouped_gemm", "e3_k1100", |lab| {
        grouped(lab, &[9, 40, 16], 80, 1100)
    });
}

fn route<B: Backend>(lab: &mut Lab<'_, B>, shape: Shape, ties: bool) -> Result<()> {
    let Shape {
        tokens,
        experts,
        topk,
        ..
    } = shape;
    // Logits beyond 17 saturate the sigmoid in fp32, so that scores tie exactly.
    let std = if ties { 60.0 } else { 1.5 };
    let logits = lab.normal_f32("logits", std, [tokens, experts])?;
    let bias_std = if ties { 0.0 } else { 0.2 };
    let bias = lab.normal_f32("bias", bias_std, [experts])?;
    let d_weights = lab.normal_f32("d_weights", 1.0, [tokens, topk])?;
    let expert_ids = lab.output(DType::I32, [tokens, topk])?;
    let weights = lab.output(DType::F32, [tokens, topk])?;
    let d_logits = lab.output(DType::F32, [tokens, experts])?;
    let select = ops::RouterSelect {
        logits: &logits.device,
        bias: &bias.device,
        expert_ids: &expert_ids,
    };
    lab.backend.router_select(&lab.stream, &select)?;
    let weigh = ops::RouterWeights {
        logits: &logits.device,
        expert_ids: &expert_ids,
        weights: &weights,
    };
    lab.backend.router_weights(&lab.stream, &weigh)?;
    let backward = ops::RouterBackward {
        logits: &logits.device,
        expert_ids: &expert_ids,
        d_weights: &d_weights.device,
        d_logits: &d_logits,
    };
    lab.backend.router_backward(&lab.stream, &backward)?;

    let params = router::Params {
        tokens,
        experts,
        topk,
    };
    let choice = router::Inputs {
        params,
        logits: &logits.host,
        bias: &bias.host,
        replay: None,
    };
    // Selection compares fp32 scores, so its reference is the one that rounds them.
    let chosen = router::forward(&choice, &lab.twin()).expert_ids;
    lab.judge_ids("expert_ids", &expert_ids, &chosen)?;
    let inputs = router::Inputs {
        replay: Some(&chosen),
        ..choice
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = router::forward(&inputs, &rounding);
        let grads = router::Grads {
            dexpert_weights: &d_weights.host,
        };
        let gradients = router::backward(&inputs, &output, &grads, &rounding);
        (output.expert_weights, gradients.dlogits)
    });
    lab.judge("expert_weights", &weights, exact.0, twin.0)?;
    lab.judge("dlogits", &d_logits, exact.1, twin.1)
}

/// k different experts for every token, ascending; the last expert gets none, the first one many.
fn expert_ids<B: Backend>(lab: &Lab<'_, B>, shape: &Shape) -> Vec<i32> {
    let Shape {
        tokens,
        experts,
        topk,
        ..
    } = *shape;
    let draws = lab.integers("experts", 1 << 20, tokens * experts);
    let choose = |row: &[i32]| {
        let mut order: Vec<i32> = (0..experts as i32 - 1).collect();
        order.sort_by_key(|&expert| (if expert == 0 { 0 } else { row[expert as usize] }, expert));
        order.truncate(topk);
        order.sort_unstable();
        order
    };
    draws.chunks_exact(experts).flat_map(choose).collect()
}

/// Rows of every expert, on the device.
struct Plan<B: Backend> {
    expert_offsets: Tensor<B>,
    row_of_slot: Tensor<B>,
    token_of_row: Tensor<B>,
}

fn plan<B: Backend>(lab: &mut Lab<'_, B>, shape: &Shape, ids: &[i32]) -> Result<Plan<B>> {
    let (tokens, topk) = (shape.tokens, shape.topk);
    let expert_ids = lab.ints(ids, [tokens, topk])?;
    let plan = Plan {
        expert_offsets: lab.output(DType::I32, [shape.experts + 1])?,
        row_of_slot: lab.output(DType::I32, [tokens, topk])?,
        token_of_row: lab.output(DType::I32, [tokens * topk])?,
    };
    let args = ops::MoePlan {
        expert_ids: &expert_ids,
        expert_offsets: &plan.expert_offsets,
        row_of_slot: &plan.row_of_slot,
        token_of_row: &plan.token_of_row,
    };
    lab.backend.moe_plan(&lab.stream, &args)?;
    Ok(plan)
}

fn permute<B: Backend>(lab: &mut Lab<'_, B>, shape: Shape) -> Result<()> {
    let Shape {
        tokens,
        experts,
        topk,
        hidden,
    } = shape;
    let rows = tokens * topk;
    let ids = expert_ids(lab, &shape);
    let plan = plan(lab, &shape, &ids)?;
    let x = lab.normal("x", 1.0, [tokens, hidden])?;
    let d_rows = lab.normal("d_rows", 1.0, [rows, hidden])?;
    let permuted = lab.output(lab.storage, [rows, hidden])?;
    let dx = lab.gradient([tokens, hidden])?;
    let forward = ops::MoePermute {
        x: &x.device,
        token_of_row: &plan.token_of_row,
        out: &permuted,
    };
    lab.backend.moe_permute(&lab.stream, &forward)?;
    let backward = ops::MoePermuteBackward {
        d_rows: &d_rows.device,
        row_of_slot: &plan.row_of_slot,
        dx: &dx,
    };
    lab.backend.moe_permute_backward(&lab.stream, &backward)?;

    let params = moe_permute::Params {
        tokens,
        hidden,
        experts,
        topk,
        dx: Precision::Fp32,
    };
    let inputs = moe_permute::Inputs {
        params,
        x: &x.host,
        expert_ids: &ids,
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = moe_permute::forward(&inputs, &rounding);
        let grads = moe_permute::Grads {
            dpermuted: &d_rows.host,
            dshared: None,
            drouter: None,
        };
        (
            moe_permute::backward(&inputs, &output, &grads, &rounding).dx,
            output,
        )
    });
    lab.judge_ids(
        "expert_offsets",
        &plan.expert_offsets,
        &exact.1.expert_offsets,
    )?;
    lab.judge_ids("row_of_slot", &plan.row_of_slot, &exact.1.row_of_slot)?;
    lab.judge_ids("token_of_row", &plan.token_of_row, &exact.1.token_of_row)?;
    lab.judge("permuted", &permuted, exact.1.permuted, twin.1.permuted)?;
    lab.judge("dx", &dx, exact.0, twin.0)
}

fn combine<B: Backend>(lab: &mut Lab<'_, B>, shape: Shape) -> Result<()> {
    let Shape {
        tokens,
        topk,
        hidden,
        ..
    } = shape;
    let rows = tokens * topk;
    let scaling = 2.0f32;
    let ids = expert_ids(lab, &shape);
    let plan = plan(lab, &shape, &ids)?;
    let down = lab.normal("down", 1.0, [rows, hidden])?;
    let weights = lab.normal_f32("weights", 0.5, [tokens, topk])?;
    let shared = lab.normal("shared", 1.0, [tokens, hidden])?;
    let d_out = lab.normal("d_out", 1.0, [tokens, hidden])?;
    let out = lab.output(lab.storage, [tokens, hidden])?;
    let d_down = lab.output(lab.storage, [rows, hidden])?;
    let d_weights = lab.output(DType::F32, [tokens, topk])?;
    let forward = ops::MoeCombine {
        down: &down.device,
        row_of_slot: &plan.row_of_slot,
        weights: &weights.device,
        shared: Some(&shared.device),
        out: &out,
        scaling,
    };
    lab.backend.moe_combine(&lab.stream, &forward)?;
    let backward = ops::MoeCombineBackward {
        d_out: &d_out.device,
        down: &down.device,
        row_of_slot: &plan.row_of_slot,
        weights: &weights.device,
        d_down: &d_down,
        d_weights: &d_weights,
        scaling,
    };
    lab.backend.moe_combine_backward(&lab.stream, &backward)?;

    let row_of_slot = plan.row_of_slot.to_vec::<i32>(lab.backend, &lab.stream)?;
    let params = moe_combine::Params {
        tokens,
        hidden,
        topk,
        scaling: f64::from(scaling),
    };
    let inputs = moe_combine::Inputs {
        params,
        down: &down.host,
        expert_weights: &weights.host,
        row_of_slot: &row_of_slot,
        shared: Some(&shared.host),
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = moe_combine::forward(&inputs, &rounding);
        let grads = moe_combine::Grads { dy: &d_out.host };
        (
            moe_combine::backward(&inputs, &output, &grads, &rounding),
            output.y,
        )
    });
    lab.judge("y", &out, exact.1, twin.1)?;
    lab.judge("ddown", &d_down, exact.0.ddown, twin.0.ddown)?;
    lab.judge(
        "dexpert_weights",
        &d_weights,
        exact.0.dexpert_weights,
        twin.0.dexpert_weights,
    )
}

fn grouped<B: Backend>(lab: &mut Lab<'_, B>, sizes: &[usize], n: usize, k: usize) -> Result<()> {
    let experts = sizes.len();
    let used: usize = sizes.iter().sum();
    // Capacity beyond the experts' rows, which must come out as zeros.
    let rows = used + 6;
    let x = lab.normal("x", 1.0, [rows, k])?;
    let w = lab.normal("w", (k as f64).powf(-0.5), [experts, n, k])?;
    let dy = lab.normal("dy", 1.0, [rows, n])?;
    let offsets = crate::lab::cu_seqlens(sizes);
    let expert_offsets = lab.ints(&offsets, [experts + 1])?;
    lab.routed(&offsets);
    let y = lab.output(lab.storage, [rows, n])?;
    let dx = lab.output(lab.storage, [rows, k])?;
    let dw = lab.gradient([experts, n, k])?;
    let product = |a: &Tensor<B>, b: &Tensor<B>, c: &Tensor<B>| {
        let args = ops::GroupedGemm {
            a,
            b,
            expert_offsets: &expert_offsets,
            c,
        };
        lab.backend.grouped_gemm(&lab.stream, &args)
    };
    product(&x.device, &w.device.transpose(1, 2), &y)?;
    product(&dy.device, &w.device, &dx)?;
    let weights = ops::GroupedGemmWeights {
        a: &dy.device,
        b: &x.device,
        expert_offsets: &expert_offsets,
        dw: &dw,
    };
    lab.backend.grouped_gemm_weights(&lab.stream, &weights)?;

    let params = grouped_gemm::Params {
        rows,
        experts,
        n,
        k,
    };
    let inputs = grouped_gemm::Inputs {
        params,
        x: &x.host,
        w: &w.host,
        expert_offsets: &offsets,
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = grouped_gemm::forward(&inputs, &rounding);
        let grads = grouped_gemm::Grads { dy: &dy.host };
        (
            grouped_gemm::backward(&inputs, &output, &grads, &rounding),
            output.y,
        )
    });
    lab.judge("y", &y, exact.1, twin.1)?;
    lab.judge("dx", &dx, exact.0.dx, twin.0.dx)?;
    lab.judge("dw", &dw, exact.0.dw, twin.0.dw)
}
