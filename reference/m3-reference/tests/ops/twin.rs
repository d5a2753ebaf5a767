//! The rounded twin beside the exact reading.

use crate::check::uniform;
use m3_reference::Rounding;
use m3_reference::layers::moe;
use m3_reference::math::dot;
use m3_reference::ops::{attention, log_prob, qk_norm_rope, rms_norm, swigluoai};

fn norm_rel(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let diff: Vec<f64> = got.iter().zip(expected).map(|(a, b)| a - b).collect();
    (dot(&diff, &diff) / dot(expected, expected)).sqrt()
}

/// Inputs that bf16 holds, so that no error enters before the op.
fn stored(seed: u64, len: usize) -> Vec<f64> {
    Rounding::BF16.store_all(uniform(seed, len))
}

/// (forward, gradients) by rounding: the twin's error is that of its storage type, no less and no more.
fn assert_twin_error(run: impl Fn(&Rounding) -> (Vec<Vec<f64>>, Vec<Vec<f64>>)) {
    let exact = run(&Rounding::Exact);
    for (rounding, low, forward, backward) in [
        (Rounding::BF16, 1e-4, 6e-3, 8e-3),
        (Rounding::F32, 1e-9, 5e-7, 5e-7),
    ] {
        let twin = run(&rounding);
        for (got, expected, bound) in [(&twin.0, &exact.0, forward), (&twin.1, &exact.1, backward)]
        {
            for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
                let error = norm_rel(got, expected);
                assert!(
                    error >= low && error <= bound,
                    "{rounding:?}, tensor {i}: {error:.1e}"
                );
                assert!(
                    got.iter().all(|&x| rounding.store(x) == x),
                    "{rounding:?}, tensor {i}"
                );
            }
        }
    }
}

#[test]
fn exact_mode_rounds_nothing() {
    let x = 1.0 + f64::EPSILON;
    let exact = Rounding::Exact;
    assert_eq!([exact.store(x), exact.operand(x), exact.fp32(x)], [x; 3]);
}

#[test]
fn operands_are_rounded_under_bf16_storage_only() {
    let x = 1.0 + 1e-3;
    assert_eq!(Rounding::BF16.operand(x), 1.0);
    assert_eq!(Rounding::F32.operand(x), x);
    assert_eq!(Rounding::BF16.fp32(x), f64::from(1.001f32));
}

#[test]
fn rms_norm_twin_shows_the_storage_error() {
    let params = rms_norm::Params {
        rows: 32,
        hidden: 128,
        eps: 1e-6,
    };
    let (resid, y, weight) = (stored(1, 4096), stored(2, 4096), stored(3, 128));
    let (dout, dr) = (stored(4, 4096), stored(5, 4096));
    let inputs = rms_norm::Inputs {
        params,
        resid: &resid,
        y: Some(&y),
        weight: &weight,
    };
    assert_twin_error(|rounding| {
        let output = rms_norm::forward(&inputs, rounding);
        let grads = rms_norm::Grads {
            dout: &dout,
            dr: Some(&dr),
        };
        let g = rms_norm::backward(&inputs, &output, &grads, rounding);
        (vec![output.out], vec![g.dresid])
    });
}

#[test]
fn qk_norm_rope_twin_shows_the_storage_error() {
    let params = qk_norm_rope::Params {
        tokens: 32,
        heads: 2,
        head_dim: 64,
        rotary_dim: 32,
        eps: 1e-6,
    };
    let table = m3_spec::rope::RotaryTable::new(1e4, 32, 32);
    let positions: Vec<i32> = (0..32).collect();
    let (x, weight, dy) = (stored(1, 4096), stored(2, 64), stored(3, 4096));
    let inputs = qk_norm_rope::Inputs {
        params,
        x: &x,
        weight: &weight,
        cos_sin: &table.cos_sin,
        positions: &positions,
    };
    assert_twin_error(|rounding| {
        let output = qk_norm_rope::forward(&inputs, rounding);
        let g =
            qk_norm_rope::backward(&inputs, &output, &qk_norm_rope::Grads { dy: &dy }, rounding);
        (vec![output.y], vec![g.dx])
    });
}

#[test]
fn swigluoai_twin_shows_the_storage_error() {
    let params = swigluoai::Params {
        alpha: 1.702,
        limit: 7.0,
    };
    let (gate, up, dy) = (stored(1, 4096), stored(2, 4096), stored(3, 4096));
    let inputs = swigluoai::Inputs {
        params,
        gate: &gate,
        up: &up,
    };
    assert_twin_error(|rounding| {
        let output = swigluoai::forward(&inputs, rounding);
        let g = swigluoai::backward(&inputs, &output, &swigluoai::Grads { dy: &dy }, rounding);
        (vec![output.y], vec![g.dgate, g.dup])
    });
}

#[test]
fn attention_twin_shows_the_storage_error_and_keeps_lse_in_fp32() {
    let (tokens, q_heads, kv_heads, head_dim) = (64, 4, 2, 32);
    let params = attention::Params {
        tokens,
        q_heads,
        kv_heads,
        head_dim,
        scale: 0.177,
        causal: true,
    };
    let (q, k, v) = (stored(1, 8192), stored(2, 4096), stored(3, 4096));
    let (d_o, cu_seqlens) = (stored(4, 8192), [0, 10, 64]);
    let inputs = attention::Inputs {
        params,
        q: &q,
        k: &k,
        v: &v,
        cu_seqlens: &cu_seqlens,
    };
    assert_twin_error(|rounding| {
        let output = attention::forward(&inputs, rounding);
        let g = attention::backward(&inputs, &output, &attention::Grads { d_o: &d_o }, rounding);
        (vec![output.o], vec![g.dq, g.dk, g.dv])
    });
    let lse = |rounding| attention::forward(&inputs, &rounding).lse;
    assert_eq!(lse(Rounding::BF16), lse(Rounding::F32));
    assert!(norm_rel(&lse(Rounding::BF16), &lse(Rounding::Exact)) <= 1e-7);
}

#[test]
fn log_probs_are_fp32_under_bf16_storage() {
    let params = log_prob::Params {
        tokens: 64,
        hidden: 64,
        vocab: 96,
        temperature: 0.8,
    };
    let (x, w, dlog_probs) = (stored(1, 4096), stored(2, 6144), stored(3, 64));
    let targets: Vec<i32> = (0..64).collect();
    let inputs = log_prob::Inputs {
        params,
        x: &x,
        w: &w,
        targets: &targets,
    };
    let exact = log_prob::forward(&inputs, &Rounding::Exact);
    let twin = log_prob::forward(&inputs, &Rounding::BF16);
    for (twin, exact) in [
        (&twin.log_probs, &exact.log_probs),
        (&twin.lse, &exact.lse),
        (&twin.entropy, &exact.entropy),
    ] {
        assert!(norm_rel(twin, exact) <= 1e-7);
    }
    assert_twin_error(|rounding| {
        let output = log_prob::forward(&inputs, rounding);
        let grads = log_prob::Grads {
            dlog_probs: &dlog_probs,
        };
        (
            vec![],
            vec![log_prob::backward(&inputs, &output, &grads, rounding).dx],
        )
    });
}

#[test]
fn moe_twin_shows_the_storage_error() {
    let params = moe::Params {
        tokens: 64,
        hidden: 64,
        experts: 8,
        topk: 2,
        width: 32,
        shared_width: 32,
        scaling: 2.0,
        swigluoai: swigluoai::Params {
            alpha: 1.702,
            limit: 7.0,
        },
    };
    let weight = |seed, len| -> Vec<f64> { stored(seed, len).iter().map(|w| w / 8.0).collect() };
    let (x, w_router, bias) = (stored(1, 64 * 64), weight(2, 8 * 64), weight(3, 8));
    let (w_gate_up, w_down) = (weight(4, 8 * 64 * 64), weight(5, 8 * 64 * 32));
    let (w_shared_gate_up, w_shared_down) = (weight(6, 64 * 64), weight(7, 64 * 32));
    let dy = stored(8, 64 * 64);
    let inputs = moe::Inputs {
        params,
        x: &x,
        w_router: &w_router,
        bias: &bias,
        replay: None,
        w_gate_up: &w_gate_up,
        w_down: &w_down,
        w_shared_gate_up: &w_shared_gate_up,
        w_shared_down: &w_shared_down,
    };
    let choice = |rounding| moe::forward(&inputs, &rounding).route;
    assert_eq!(
        choice(Rounding::BF16),
        choice(Rounding::F32),
        "the router reads no rounded value"
    );
    assert_twin_error(|rounding| {
        let output = moe::forward(&inputs, rounding);
        let dx = moe::backward(&inputs, &output, &moe::Grads { dy: &dy }, rounding).dx;
        (vec![output.combine.y], vec![dx])
    });
}
