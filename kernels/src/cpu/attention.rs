//! Dense attention, and what block-sparse attention shares with it.

mod backward;
pub(in crate::cpu) mod forward;
pub(in crate::cpu) mod mask;
pub(in crate::cpu) mod rows;
pub(in crate::cpu) mod selection;
mod softmax;

use std::ops::Range;

use rayon::prelude::*;

use super::CpuBackend;
use super::access::{Access, Storage, View, ViewMut, sequences, with_storage};
use crate::error::Result;
use crate::launch::AttentionConfig;
use crate::ops;
use crate::tensor::Tensor;

pub(in crate::cpu) use backward::Seen;

use backward::{Backward, KeyTask};
use forward::Forward;
use mask::{Queries, Sight};
use rows::Packed;

type CpuTensor = Tensor<CpuBackend>;

pub(super) fn attention(_: &CpuBackend, args: &ops::Attention<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let operands = [args.q, args.k, args.v, args.cu_seqlens, args.o, args.lse];
    let access = Access::lock(&operands);
    let cu_seqlens = access.read::<i32>(args.cu_seqlens).as_slice();
    let sequences = sequences("attention", cu_seqlens, dims.tokens)?;
    with_storage!(args.q.dtype(), T => {
        let pass = Forward::<T> {
            q: access.read(args.q),
            o: access.write(args.o),
            lse: access.write(args.lse),
            sight: if args.causal { Sight::Causal } else { Sight::Whole },
            group: dims.group(),
            scale: args.scale,
            key_tile: args.config.key_tile,
        };
        let (k, v) = (access.read(args.k), access.read(args.v));
        forward_pack(&pass, [k, v], &sequences, args.config.query_tile);
    });
    Ok(())
}

pub(super) fn attention_backward(
    _: &CpuBackend,
    args: &ops::AttentionBackward<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let operands = [
        args.q,
        args.k,
        args.v,
        args.cu_seqlens,
        args.o,
        args.lse,
        args.d_o,
        args.dq,
        args.dk,
        args.dv,
        args.workspace,
    ];
    let access = Access::lock(&operands);
    let cu_seqlens = access.read::<i32>(args.cu_seqlens).as_slice();
    let sequences = sequences("attention_backward", cu_seqlens, dims.tokens)?;
    let gradient = Gradient {
        operands: [args.q, args.k, args.v, args.o, args.lse, args.d_o],
        results: [args.dq, args.dk, args.dv],
        workspace: args.workspace,
        sight: if args.causal {
            Sight::Causal
        } else {
            Sight::Whole
        },
        scale: args.scale,
        config: args.config,
        dims,
    };
    let causal = args.causal;
    let seen =
        |_: usize, _: usize, keys: &Range<usize>| Seen::From(if causal { keys.start } else { 0 });
    with_storage!(args.q.dtype(), T => gradient.run::<T>(&access, &sequences, seen));
    Ok(())
}

/// Forward pass over every sequence of a packed batch.
pub(in crate::cpu) fn forward_pack<T: Storage>(
    pass: &Forward<'_, T>,
    [k, v]: [View<'_, T>; 2],
    sequences: &[Range<usize>],
    query_tile: usize,
) {
    let covered = sequences.last().map_or(0, |sequence| sequence.end);
    fill_rows(pass.o, covered, T::default());
    for token in covered..pass.lse.shape()[0] {
        // SAFETY: no task has begun.
        unsafe { pass.lse.row_mut([token]) }.fill(f32::NEG_INFINITY);
    }
    let tasks = query_tasks(sequences, k.shape()[1], query_tile);
    tasks
        .into_par_iter()
        .with_max_len(1)
        .for_each(|(kv_head, queries)| {
            let rows = |rows| Packed {
                rows,
                first: queries.rows.start - queries.position,
                head: kv_head,
            };
            pass.run(kv_head, &queries, &rows(k), &rows(v));
        });
}

/// A backward pass over every sequence of a packed batch.
pub(in crate::cpu) struct Gradient<'a> {
    /// q, k, v, o, lse, dO.
    pub operands: [&'a CpuTensor; 6],
    /// dq, dk, dv.
    pub results: [&'a CpuTensor; 3],
    pub workspace: &'a CpuTensor,
    pub sight: Sight<'a>,
    pub scale: f32,
    pub config: AttentionConfig,
    pub dims: ops::AttentionDims,
}

impl Gradient<'_> {
    /// `seen` tells the queries of some keys of a sequence: (kv head, sequence, keys).
    pub(in crate::cpu) fn run<'s, T: Storage>(
        &self,
        access: &Access<'_>,
        sequences: &[Range<usize>],
        seen: impl Fn(usize, usize, &Range<usize>) -> Seen<'s> + Sync,
    ) {
        let ops::AttentionDims {
            tokens,
            q_heads,
            kv_heads,
            head_dim,
            ..
        } = self.dims;
        let splits = self.splits();
        let [q, k, v, o, lse, d_o] = self.operands;
        let [dq, dk, dv] = self.results.map(|tensor| access.write::<T>(tensor));
        let (delta, slices) = (tokens * q_heads, splits * tokens * kv_heads * head_dim);
        let part = |range: Range<usize>| self.workspace.slice(0, range);
        let delta = part(0..delta).reshape([tokens, q_heads]);
        let first = delta.elements();
        let [dk_slices, dv_slices] = [first, first + slices].map(|first| {
            let slices = part(first..first + slices).reshape([splits, tokens, kv_heads, head_dim]);
            access.write::<f32>(&slices)
        });
        self.fill_delta::<T>(access, [o, d_o], access.write(&delta));
        let pass = Backward::<T> {
            q: access.read(q),
            k: access.read(k),
            v: access.read(v),
            d_o: access.read(d_o),
            lse: access.read(lse),
            delta: access.read(&delta),
            dq,
            dk_slices,
            dv_slices,
            sight: self.sight,
            group: self.dims.group(),
            scale: self.scale,
            key_tile: self.config.key_tile,
            query_tile: self.config.query_tile,
        };
        let tasks = query_tasks(sequences, kv_heads, self.config.query_tile);
        tasks
            .into_par_iter()
            .with_max_len(1)
            .for_each(|(kv_head, queries)| pass.queries(kv_head, &queries));
        let tasks = self.key_tasks(sequences);
        tasks
            .into_par_iter()
            .with_max_len(1)
            .for_each(|(number, task)| pass.keys(&task, seen(task.kv_head, number, &task.keys)));
        let covered = sequences.last().map_or(0, |sequence| sequence.end);
        for result in [dq, dk, dv] {
            fill_rows(result, covered, T::default());
        }
        sum_slices(dk_slices, covered, self.scale, dk);
        sum_slices(dv_slices, covered, 1.0, dv);
    }

    /// Slices of the query heads of a kv head, none of them empty.
    fn splits(&self) -> usize {
        self.config.head_splits.min(self.dims.group())
    }

    /// Every key tile and slice of the query heads, with the number of its sequence.
    fn key_tasks(&self, sequences: &[Range<usize>]) -> Vec<(usize, KeyTask)> {
        let (splits, group) = (self.splits(), self.dims.group());
        let key_tile = self.config.key_tile;
        let mut tasks = Vec::new();
        for (number, sequence) in sequences.iter().enumerate() {
            for kv_head in 0..self.dims.kv_heads {
                for split in 0..splits {
                    let of_group = split * group / splits..(split + 1) * group / splits;
                    let first_head = kv_head * group;
                    for first in (0..sequence.len()).step_by(key_tile) {
                        let task = KeyTask {
                            sequence: sequence.clone(),
                            kv_head,
                            keys: first..sequence.len().min(first + key_tile),
                            split,
                            heads: first_head + of_group.start..first_head + of_group.end,
                        };
                        tasks.push((number, task));
                    }
                }
            }
        }
        tasks
    }

    fn fill_delta<T: Storage>(
        &self,
        access: &Access<'_>,
        [o, d_o]: [&CpuTensor; 2],
        delta: ViewMut<'_, f32>,
    ) {
        let (o, d_o) = (access.read::<T>(o), access.read::<T>(d_o));
        (0..self.dims.tokens).into_par_iter().for_each(|token| {
            for head in 0..self.dims.q_heads {
                let sum = softmax::delta(d_o.row([token, head]), o.row([token, head]));
                // SAFETY: a token belongs to one task.
                unsafe { delta.set([token, head], sum) };
            }
        });
    }
}

/// result = scale · Σ slices, in order, one rounding.
fn sum_slices<T: Storage>(
    slices: ViewMut<'_, f32>,
    covered: usize,
    scale: f32,
    result: ViewMut<'_, T>,
) {
    let (splits, kv_heads) = (slices.shape()[0], slices.shape()[2]);
    (0..covered)
        .into_par_iter()
        .for_each_init(Vec::new, |sum, token| {
            for head in 0..kv_heads {
                // SAFETY: every task has finished; a token belongs to one task of this loop.
                let (slice, result) = unsafe {
                    let slice = |split| &*slices.row_mut([split, token, head]);
                    (slice, result.row_mut([token, head]))
                };
                sum.clear();
                sum.extend_from_slice(slice(0));
                for split in 1..splits {
                    softmax::add(slice(split), sum);
                }
                softmax::store_scaled(sum, scale, result);
            }
        });
}

/// Sets the rows of the tokens from `first` on.
fn fill_rows<T: Storage>(rows: ViewMut<'_, T>, first: usize, value: T) {
    for token in first..rows.shape()[0] {
        for head in 0..rows.shape()[1] {
            // SAFETY: no task touches these rows.
            unsafe { rows.row_mut([token, head]) }.fill(value);
        }
    }
}

/// (kv head, queries) of every task over query tiles.
fn query_tasks(
    sequences: &[Range<usize>],
    kv_heads: usize,
    query_tile: usize,
) -> Vec<(usize, Queries)> {
    let mut tasks = Vec::new();
    for sequence in sequences {
        for kv_head in 0..kv_heads {
            for first in sequence.clone().step_by(query_tile) {
                let queries = Queries {
                    rows: first..sequence.end.min(first + query_tile),
                    position: first - sequence.start,
                    keys: sequence.len(),
                };
                tasks.push((kv_head, queries));
            }
        }
    }
    tasks
}
