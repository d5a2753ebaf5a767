//! Rows that lie further into memory than 32 bits can count.

use m3_kernels::cpu::CpuBackend;
use m3_kernels::launch::AttentionConfig;
use m3_kernels::tensor::as_bytes;
use m3_kernels::{Backend, Tensor, ops};
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};

use crate::pack::full;

const TOKENS: usize = 5;
const HEAD_DIM: usize = 8;

/// o of a document whose keys and values are the last two slices of rows of this width.
fn o(row: usize) -> Vec<half::bf16> {
    let (backend, inputs) = (CpuBackend::default(), Inputs::new(0x5eed, "far rows"));
    let stream = backend.stream();
    let draw = |label| {
        let normal = Distribution::Normal { std: 1.0 };
        inputs.bf16s(label, normal, TOKENS * HEAD_DIM)
    };
    let fused = Tensor::zeros(&backend, DType::BF16, [TOKENS, row]).expect("5 GiB of memory");
    let [k, v] = [("k", row - 2 * HEAD_DIM), ("v", row - HEAD_DIM)].map(|(label, first)| {
        let slice = fused.slice(1, first..first + HEAD_DIM).split_last(HEAD_DIM);
        backend
            .upload(&stream, &slice, as_bytes(&draw(label)))
            .expect("upload");
        slice
    });
    let q = Tensor::from_slice(&backend, &stream, &draw("q"), [TOKENS, 1, HEAD_DIM]).unwrap();
    let ends = Tensor::from_slice(&backend, &stream, &[0, TOKENS as i32], [2]).unwrap();
    let own = [0, -1, 0, -1, 0, 1, 0, 1, 1, 2];
    let block_ids = Tensor::from_slice(&backend, &stream, &own, [1, TOKENS, 2]).unwrap();
    let o = Tensor::zeros(&backend, DType::BF16, [TOKENS, 1, HEAD_DIM]).unwrap();
    let args = ops::MsaAttention {
        q: &q,
        k: &k,
        v: &v,
        cu_seqlens: &ends,
        block_ids: &block_ids,
        o: &o,
        lse: &Tensor::zeros(&backend, DType::F32, [TOKENS, 1]).unwrap(),
        block: 2,
        scale: 0.5,
        config: AttentionConfig {
            key_tile: 32,
            query_tile: 64,
            head_splits: 1,
        },
    };
    backend.msa_attention(&stream, &args).expect("attention");
    o.to_vec(&backend, &stream).expect("read")
}

#[test]
fn keys_past_2_31_elements_are_read_where_they_lie() {
    // The last row begins at element 2^31, and ends 5 GiB into its buffer: too much for every run.
    if full() {
        assert_eq!(o(1 << 29), o(4 * HEAD_DIM));
    }
}
