//! Log-probabilities of target tokens, in blocks of rows and tiles of the vocabulary; the full logits are never held.
//!
//! Only rows that have a target are read, gathered in f32. A row's logits of one tile are reduced to [`TileSums`]; those
//! of all tiles are merged in ascending order. So tiles are computed in any order and by any thread, and a row's bits
//! depend on the row and on [`VOCAB_TILE`] alone.

use std::cell::RefCell;
use std::ops::Range;

use m3_spec::dtype::DType;
use rayon::prelude::*;

use super::CpuBackend;
use super::access::{Access, Storage, with_storage};
use super::gemm::{self, Matrix, MatrixMut};
use super::linear::{matrix, matrix_mut};
use super::math::{exp, from_bf16, log, to_bf16};
use super::rows::{Rows, RowsMut};
use super::simd::{dispatch, fold, greater, max, sum};
use crate::error::{Error, Result};
use crate::ops;
use crate::tensor::Tensor;

/// Vocabulary ids of a tile. Part of the result's definition.
pub(super) const VOCAB_TILE: usize = 512;

/// Rows that pass the head together. Part of the definition of the head's gradient, which sums over rows.
const ROW_BLOCK: usize = 512;

pub(super) fn log_prob(_: &CpuBackend, args: &ops::LogProb<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let outputs = [args.log_prob, args.lse, args.entropy];
    let inputs = [args.x, args.weight, args.targets, args.temperature];
    let held = Access::lock(&[&inputs[..], &outputs].concat());
    let temperature = temperature("log_prob", &held, args.temperature)?;
    let targets = held.read::<i32>(args.targets).as_slice();
    let scored = scored("log_prob", targets, dims.vocab)?;
    let x = Rows::new(&held, args.x);
    let outputs = outputs.map(|tensor| held.write::<f32>(tensor));
    for output in &outputs {
        // SAFETY: no task runs yet.
        unsafe { output.as_mut_slice() }.fill(0.0);
    }
    with_storage!(args.weight.dtype(), W => {
        let weight = matrix(&held.read::<W>(args.weight));
        scored.par_chunks(ROW_BLOCK).for_each(|tokens| {
            let rows = gather(&x, tokens, dims.hidden);
            let rows = Matrix::row_major(&rows, tokens.len(), dims.hidden);
            let tiles: Vec<Vec<RowTile>> = tiles(dims.vocab)
                .map(|ids| score_tile(rows, weight, ids, tokens, targets, temperature))
                .collect();
            for (row, &t) in tokens.iter().enumerate() {
                let sums = tiles.iter().fold(TileSums::default(), |sums, tile| merge(sums, tile[row].sums));
                let target = tiles[targets[t] as usize / VOCAB_TILE][row].target;
                let values = [sums.log_prob(target), sums.lse(), sums.entropy()];
                for (output, value) in outputs.iter().zip(values) {
                    // SAFETY: a token belongs to one task.
                    unsafe { output.set([t], value) };
                }
            }
        });
    });
    Ok(())
}

pub(super) fn log_prob_backward(
    _: &CpuBackend,
    args: &ops::LogProbBackward<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[
        args.x,
        args.weight,
        args.targets,
        args.temperature,
        args.lse,
        args.d_log_prob,
        args.dx,
        args.d_weight,
    ]);
    let op = "log_prob_backward";
    let temperature = temperature(op, &held, args.temperature)?;
    let targets = held.read::<i32>(args.targets).as_slice();
    let scored = scored(op, targets, dims.vocab)?;
    let x = Rows::new(&held, args.x);
    let softmax = Softmax {
        targets,
        lse: held.read::<f32>(args.lse).as_slice(),
        d_log_prob: held.read::<f32>(args.d_log_prob).as_slice(),
        temperature,
        rounded: args.x.dtype() == DType::BF16,
    };
    let dx = RowsMut::new(&held, args.dx);
    let zeros = vec![0.0; dims.hidden];
    for t in (0..dims.tokens).filter(|&t| targets[t] < 0) {
        // SAFETY: no task runs yet.
        unsafe { dx.store([t], &zeros) };
    }
    with_storage!(args.weight.dtype(), W => {
        let weight = matrix(&held.read::<W>(args.weight));
        let d_weight = held.write::<f32>(args.d_weight);
        // SAFETY: the only access to the head's gradient.
        let d_weight = unsafe { matrix_mut(&d_weight) };
        for tokens in scored.chunks(ROW_BLOCK) {
            let rows = gather(&x, tokens, dims.hidden);
            let rows = Matrix::row_major(&rows, tokens.len(), dims.hidden);
            let d_rows = backward_block(rows, weight, &d_weight, tokens, &softmax);
            for (&t, d_row) in tokens.iter().zip(d_rows.chunks_exact(dims.hidden.max(1))) {
                // SAFETY: no task runs any more.
                unsafe { dx.store([t], d_row) };
            }
        }
    });
    Ok(())
}

fn temperature(op: &'static str, held: &Access<'_>, tensor: &Tensor<CpuBackend>) -> Result<f32> {
    let temperature = held.read::<f32>(tensor).at([0]);
    if temperature > 0.0 && temperature.is_finite() {
        return Ok(temperature);
    }
    let what = format!(
        "temperature {temperature} has no log-probabilities; it must be finite and above 0"
    );
    Err(Error::Argument { op, what })
}

/// Tokens that have a target.
fn scored(op: &'static str, targets: &[i32], vocab: usize) -> Result<Vec<usize>> {
    let scored: Vec<usize> = (0..targets.len()).filter(|&t| targets[t] >= 0).collect();
    match scored.iter().find(|&&t| targets[t] as usize >= vocab) {
        None => Ok(scored),
        Some(&index) => Err(Error::Index {
            op,
            tensor: "targets",
            index,
            value: i64::from(targets[index]),
            lower: i64::from(i32::MIN),
            upper: vocab as i64,
        }),
    }
}

/// Rows of the given tokens, row-major in f32.
fn gather(x: &Rows<'_>, tokens: &[usize], hidden: usize) -> Vec<f32> {
    let (mut rows, mut scratch) = (vec![0.0; tokens.len() * hidden], vec![0.0; hidden]);
    for (row, &t) in rows.chunks_exact_mut(hidden.max(1)).zip(tokens) {
        row.copy_from_slice(x.row([t], &mut scratch));
    }
    rows
}

/// Ids of every tile.
fn tiles(vocab: usize) -> impl IndexedParallelIterator<Item = Range<usize>> {
    (0..vocab.div_ceil(VOCAB_TILE))
        .into_par_iter()
        .map(move |tile| tile * VOCAB_TILE..((tile + 1) * VOCAB_TILE).min(vocab))
}

/// What a tile of the vocabulary says of one row.
#[derive(Clone, Copy)]
struct RowTile {
    sums: TileSums,
    /// Tempered logit of the row's target, where it lies in the tile.
    target: f32,
}

#[derive(Default)]
struct Scratch {
    gemm: gemm::Scratch,
    logits: Vec<f32>,
    exps: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

fn score_tile<W: Storage>(
    rows: Matrix<'_, f32>,
    weight: Matrix<'_, W>,
    ids: Range<usize>,
    tokens: &[usize],
    targets: &[i32],
    temperature: f32,
) -> Vec<RowTile> {
    let (width, hidden) = (ids.len(), rows.cols());
    // Nothing below hands a task to another thread, so the scratch is never borrowed twice.
    SCRATCH.with_borrow_mut(|scratch| {
        let Scratch { gemm, logits, exps } = scratch;
        logits.resize(tokens.len() * width, 0.0);
        exps.resize(width, 0.0);
        let weight = weight.block(ids.clone(), 0..hidden).transposed();
        let c = MatrixMut::row_major(logits, tokens.len(), width);
        gemm::gemm_block(gemm, rows, weight, c, false);
        let of_row = |(&t, logits): (&usize, &mut [f32])| {
            let target = targets[t] as usize;
            let within = ids.contains(&target);
            RowTile {
                target: if within {
                    logits[target - ids.start] / temperature
                } else {
                    f32::NAN
                },
                sums: tile_sums(logits, exps, temperature),
            }
        };
        tokens
            .iter()
            .zip(logits.chunks_exact_mut(width))
            .map(of_row)
            .collect()
    })
}

/// A softmax over some of a row's logits z, relative to their largest.
#[derive(Clone, Copy)]
pub(super) struct TileSums {
    max: f32,
    /// Σ exp(z − max), at least 1 once there is a logit.
    sum: f32,
    /// Σ exp(z − max)·(z − max).
    weighted: f32,
}

impl Default for TileSums {
    /// Of no logit.
    fn default() -> Self {
        TileSums {
            max: f32::NEG_INFINITY,
            sum: 0.0,
            weighted: 0.0,
        }
    }
}

impl TileSums {
    /// log softmax of one of the logits; never above 0, as neither term is.
    pub(super) fn log_prob(&self, z: f32) -> f32 {
        (z - self.max) - log(self.sum)
    }

    /// Log of the sum of exponentials.
    pub(super) fn lse(&self) -> f32 {
        self.max + log(self.sum)
    }

    /// −Σ p·ln p.
    pub(super) fn entropy(&self) -> f32 {
        log(self.sum) - self.weighted / self.sum
    }

    /// Relative to a larger logit.
    #[inline(always)]
    fn relative_to(self, max: f32) -> Self {
        if self.max == max {
            return self;
        }
        if self.max == f32::NEG_INFINITY {
            return TileSums { max, ..self };
        }
        let shift = self.max - max;
        let factor = exp(shift);
        TileSums {
            max,
            sum: factor * self.sum,
            weighted: factor * self.sum.mul_add(shift, self.weighted),
        }
    }
}

dispatch! {
    /// The sums of a tile's logits, which are divided by the temperature and then lost; `exps` has their length.
    pub(super) fn tile_sums(z: &mut [f32], exps: &mut [f32], temperature: f32) -> TileSums {
        for z in z.iter_mut() {
            *z /= temperature;
        }
        let max = max(z);
        if max == f32::NEG_INFINITY {
            return TileSums::default();
        }
        for (z, e) in z.iter_mut().zip(exps.iter_mut()) {
            *z -= max;
            *e = exp(*z);
        }
        // A logit of -inf has p·ln p = 0, not 0·inf.
        let step = |sum: f32, [z, e]: [f32; 2]| if e == 0.0 { sum } else { e.mul_add(z, sum) };
        TileSums {
            max,
            sum: sum(exps),
            weighted: fold([z, exps], 0.0, step, |a, b| a + b),
        }
    }

    /// The sums over both.
    pub(super) fn merge(a: TileSums, b: TileSums) -> TileSums {
        let max = greater(a.max, b.max);
        let (a, b) = (a.relative_to(max), b.relative_to(max));
        TileSums {
            max,
            sum: a.sum + b.sum,
            weighted: a.weighted + b.weighted,
        }
    }
}

/// What the gradient of the logits needs beside them.
struct Softmax<'a> {
    targets: &'a [i32],
    lse: &'a [f32],
    d_log_prob: &'a [f32],
    temperature: f32,
    /// Whether d_logits are rounded to bf16.
    rounded: bool,
}

/// Gradient of a block's rows, in f32; adds the block to the head's gradient. Tiles pass in ascending order.
fn backward_block<W: Storage>(
    rows: Matrix<'_, f32>,
    weight: Matrix<'_, W>,
    d_weight: &MatrixMut<'_, f32>,
    tokens: &[usize],
    softmax: &Softmax<'_>,
) -> Vec<f32> {
    let (count, hidden, vocab) = (rows.rows(), rows.cols(), weight.rows());
    let mut d_rows = vec![0.0; count * hidden];
    let mut d_logits = vec![0.0; count * VOCAB_TILE.min(vocab)];
    for first in (0..vocab).step_by(VOCAB_TILE) {
        let ids = first..(first + VOCAB_TILE).min(vocab);
        let width = ids.len();
        let d_logits = &mut d_logits[..count * width];
        let weight = weight.block(ids.clone(), 0..hidden);
        let c = MatrixMut::row_major(d_logits, count, width);
        gemm::gemm(rows, weight.transposed(), c, false);
        d_logits
            .par_chunks_exact_mut(width)
            .zip(tokens)
            .for_each(|(z, &t)| softmax.d_logits(z, &ids, t));
        let d_logits = Matrix::row_major(d_logits, count, width);
        let c = MatrixMut::row_major(&mut d_rows, count, hidden);
        gemm::gemm(d_logits, weight, c, true);
        // SAFETY: tiles pass one after another.
        let c = unsafe { d_weight.block(ids, 0..hidden) };
        gemm::gemm(d_logits.transposed(), rows, c, true);
    }
    d_rows
}

impl Softmax<'_> {
    /// Logits of a tile become their gradients.
    fn d_logits(&self, z: &mut [f32], ids: &Range<usize>, t: usize) {
        let target = self.targets[t] as usize;
        let hit = if ids.contains(&target) {
            target - ids.start
        } else {
            z.len()
        };
        let (lse, d) = (self.lse[t], self.d_log_prob[t]);
        gradients(z, hit, lse, d, self.temperature);
        if self.rounded {
            round(z);
        }
    }
}

dispatch! {
    fn gradients(z: &mut [f32], hit: usize, lse: f32, d_log_prob: f32, temperature: f32) {
        for (id, z) in z.iter_mut().enumerate() {
            let target = if id == hit { 1.0 } else { 0.0 };
            *z = d_log_prob * (target - exp(*z / temperature - lse)) / temperature;
        }
    }

    fn round(x: &mut [f32]) {
        for x in x {
            *x = from_bf16(to_bf16(*x));
        }
    }
}
