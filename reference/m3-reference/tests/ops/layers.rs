//! Compositions: the MLP and the mixture of experts.

use crate::check::{assert_close, assert_derivative, uniform};
use m3_reference::layers::{attention, mlp, moe};
use m3_reference::math::{axpy, dot};
use m3_reference::ops::swigluoai;
use m3_reference::{Precision, Rounding};
use m3_spec::config::IndexConfig;
use m3_spec::rope::RotaryTable;

const EXACT: Rounding = Rounding::Exact;
const SWIGLUOAI: swigluoai::Params = swigluoai::Params {
    alpha: 1.702,
    limit: 7.0,
};

const MOE: moe::Params = moe::Params {
    tokens: 5,
    hidden: 6,
    experts: 4,
    topk: 2,
    width: 3,
    shared_width: 4,
    scaling: 2.0,
    swigluoai: SWIGLUOAI,
};

/// x, router, experts' gate/up and down, shared gate/up and down.
fn moe_operands() -> Vec<Vec<f64>> {
    let lengths = [5 * 6, 4 * 6, 4 * 6 * 6, 4 * 6 * 3, 8 * 6, 6 * 4];
    lengths
        .iter()
        .enumerate()
        .map(|(i, &len)| uniform(i as u64, len))
        .collect()
}

fn moe_inputs<'a>(
    x: &'a [Vec<f64>],
    bias: &'a [f64],
    replay: Option<&'a [i32]>,
) -> moe::Inputs<'a> {
    moe::Inputs {
        params: MOE,
        x: &x[0],
        w_router: &x[1],
        bias,
        replay,
        w_gate_up: &x[2],
        w_down: &x[3],
        w_shared_gate_up: &x[4],
        w_shared_down: &x[5],
    }
}

#[test]
fn mlp_gradients_are_its_derivative() {
    let (rows, hidden, width) = (4, 6, 5);
    let params = mlp::Params {
        rows,
        hidden,
        width,
        swigluoai: SWIGLUOAI,
        dx: Precision::Storage,
    };
    let x = [uniform(1, 24), uniform(2, 60), uniform(3, 30)];
    let dy = uniform(4, 24);
    fn inputs(params: mlp::Params, x: &[Vec<f64>]) -> mlp::Inputs<'_> {
        mlp::Inputs {
            params,
            x: &x[0],
            w_gate_up: &x[1],
            w_down: &x[2],
        }
    }
    let output = mlp::forward(&inputs(params, &x), &EXACT);
    let g = mlp::backward(
        &inputs(params, &x),
        &output,
        &mlp::Grads { dy: &dy },
        &EXACT,
    );
    assert_derivative(&x, &[g.dx, g.dw_gate_up, g.dw_down], |x| {
        dot(&mlp::forward(&inputs(params, x), &EXACT).down.y, &dy)
    });
}

#[test]
fn moe_gradients_are_its_derivative() {
    let (x, bias, dy) = (moe_operands(), uniform(7, 4), uniform(8, 30));
    let run = |x: &[Vec<f64>]| moe::forward(&moe_inputs(x, &bias, None), &EXACT);
    let g = moe::backward(
        &moe_inputs(&x, &bias, None),
        &run(&x),
        &moe::Grads { dy: &dy },
        &EXACT,
    );
    let gradients = [
        g.dx,
        g.dw_router,
        g.dw_gate_up,
        g.dw_down,
        g.dw_shared_gate_up,
        g.dw_shared_down,
    ];
    assert_derivative(&x, &gradients, |x| dot(&run(x).combine.y, &dy));
}

#[test]
fn replaying_the_own_choice_changes_nothing() {
    let (x, bias) = (moe_operands(), uniform(7, 4));
    let own = moe::forward(&moe_inputs(&x, &bias, None), &EXACT);
    // The bias selects only, so a replay does not depend on it.
    let ids = &own.route.expert_ids;
    let replayed = moe::forward(&moe_inputs(&x, &[0.0; 4], Some(ids)), &EXACT);
    assert_eq!(own.combine.y, replayed.combine.y);
}

/// 2 · Σ w_j·E_j(x) + Shared(x), each expert an MLP of its own over all tokens.
#[test]
fn moe_is_the_weighted_sum_of_its_experts() {
    let (x, bias) = (moe_operands(), uniform(7, 4));
    let output = moe::forward(&moe_inputs(&x, &bias, None), &EXACT);
    let expert = |width: usize, w_gate_up: &[f64], w_down: &[f64]| {
        let dx = Precision::Storage;
        let params = mlp::Params {
            rows: 5,
            hidden: 6,
            width,
            swigluoai: SWIGLUOAI,
            dx,
        };
        mlp::forward(
            &mlp::Inputs {
                params,
                x: &x[0],
                w_gate_up,
                w_down,
            },
            &EXACT,
        )
        .down
        .y
    };
    let mut expected = expert(4, &x[4], &x[5]);
    for e in 0..4 {
        let y = expert(3, &x[2][e * 36..(e + 1) * 36], &x[3][e * 18..(e + 1) * 18]);
        for (slot, &chosen) in output.route.expert_ids.iter().enumerate() {
            if chosen == e as i32 {
                let (row, w) = (slot / 2 * 6, output.route.expert_weights[slot]);
                axpy(&mut expected[row..row + 6], 2.0 * w, &y[row..row + 6]);
            }
        }
    }
    assert_close(&output.combine.y, &expected, 1e-14);
}

const INDEX: IndexConfig = IndexConfig {
    num_heads: 2,
    head_dim: 4,
    block_size: 2,
    topk_blocks: 2,
    init_blocks: 0,
    local_blocks: 1,
};

/// Operands x, q, k, v, o, the two norms, and those of the indexer.
const ATTENTION_LENGTHS: [usize; 11] = [
    9 * 6,
    16 * 6,
    8 * 6,
    8 * 6,
    6 * 16,
    4,
    4,
    8 * 6,
    4 * 6,
    4,
    4,
];

fn attention_inputs<'a>(
    x: &'a [Vec<f64>],
    pack: attention::Pack<'a>,
    sparse: bool,
) -> attention::Inputs<'a> {
    let params = attention::Params {
        hidden: 6,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 4,
        rotary_dim: 2,
        eps: 1e-6,
    };
    let indexer = attention::Indexer {
        config: &INDEX,
        w_q: &x[7],
        w_k: &x[8],
        q_norm: &x[9],
        k_norm: &x[10],
    };
    attention::Inputs {
        params,
        pack,
        x: &x[0],
        w_q: &x[1],
        w_k: &x[2],
        w_v: &x[3],
        w_o: &x[4],
        q_norm: &x[5],
        k_norm: &x[6],
        indexer: sparse.then_some(indexer),
        replay: None,
    }
}

#[test]
fn attention_layer_gradients_are_its_derivative_and_the_indexer_has_none() {
    let table = RotaryTable::new(1e4, 2, 7);
    let positions = [0, 1, 0, 1, 2, 3, 4, 5, 6];
    let (cu_seqlens, cos_sin) = (&[0, 2, 9], &table.cos_sin);
    let pack = attention::Pack {
        cu_seqlens,
        positions: &positions,
        cos_sin,
    };
    let lengths = ATTENTION_LENGTHS.iter().enumerate();
    let x: Vec<_> = lengths.map(|(i, &len)| uniform(i as u64, len)).collect();
    let dy = uniform(20, 54);
    let run = |x: &[Vec<f64>], sparse, rounding: &Rounding| {
        let inputs = attention_inputs(x, pack, sparse);
        let output = attention::forward(&inputs, rounding);
        let g = attention::backward(&inputs, &output, &attention::Grads { dy: &dy }, rounding);
        (output, g)
    };
    for sparse in [false, true] {
        let (_, g) = run(&x, sparse, &EXACT);
        let gradients = [g.dx, g.dw_q, g.dw_k, g.dw_v, g.dw_o, g.dq_norm, g.dk_norm];
        assert_derivative(&x[..7], &gradients, |trained| {
            let x = [trained, &x[7..]].concat();
            let output = attention::forward(&attention_inputs(&x, pack, sparse), &EXACT);
            dot(&output.o.y, &dy)
        });
        let dx = run(&x, sparse, &Rounding::BF16).1.dx;
        assert_eq!(
            dx,
            Rounding::BF16.store_all(dx.clone()),
            "the sum of the shares is rounded"
        );
    }
}
