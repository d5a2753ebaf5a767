//! The sampler: tempered logits, top-k, top-p, Gumbel noise, argmax.
//!
//! Noise is computed in f64 with [`m3_spec::math`], so that a draw does not depend on the platform. The log-probability
//! takes the vocabulary tiles of [`super::log_prob`]: its bits are those of scoring the drawn token afterwards.

use m3_spec::math::ln;
use m3_spec::philox::{Philox, Stream, unit_open};
use rayon::prelude::*;

use super::CpuBackend;
use super::access::Access;
use super::log_prob::{TileSums, VOCAB_TILE, merge, tile_sums};
use crate::error::{Error, Result};
use crate::ops;

/// Settings of a draw, out of their buffers.
#[derive(Clone, Copy)]
struct Settings {
    temperature: f32,
    top_k: usize,
    top_p: f32,
}

pub(super) fn sample(_: &CpuBackend, args: &ops::Sample<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[
        args.logits,
        args.temperature,
        args.top_k,
        args.top_p,
        args.counters,
        args.tokens,
        args.log_prob,
    ]);
    let settings = Settings::read(&held, args)?;
    let logits = held.read::<f32>(args.logits);
    let counters = held.read::<i32>(args.counters).as_slice();
    let (tokens, log_prob) = (
        held.write::<i32>(args.tokens),
        held.write::<f32>(args.log_prob),
    );
    let philox = Philox::new(args.seed, Stream::Sampler);
    (0..dims.rows).into_par_iter().for_each(|r| {
        let counter = [0, 1, 2].map(|part| counters[3 * r + part] as u32);
        let row = logits.row([r]);
        let token = draw(row, settings, &philox, counter);
        // SAFETY: a row belongs to one task.
        unsafe {
            tokens.set([r], token as i32);
            log_prob.set([r], score(row, token, settings.temperature));
        }
    });
    Ok(())
}

impl Settings {
    fn read(held: &Access<'_>, args: &ops::Sample<'_, CpuBackend>) -> Result<Self> {
        let temperature = held.read::<f32>(args.temperature).at([0]);
        let top_k = held.read::<i32>(args.top_k).at([0]);
        let top_p = held.read::<f32>(args.top_p).at([0]);
        let refused = |what: String| Err(Error::Argument { op: "sample", what });
        if !(temperature > 0.0 && temperature.is_finite()) {
            return refused(format!(
                "temperature {temperature} must be finite and above 0"
            ));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refused(format!("top_p {top_p} must be above 0 and at most 1"));
        }
        let Ok(top_k) = usize::try_from(top_k) else {
            return refused(format!("top_k {top_k} must not be negative"));
        };
        Ok(Settings {
            temperature,
            top_k,
            top_p,
        })
    }
}

/// The kept id with the largest tempered logit plus noise; the lower one on ties.
fn draw(logits: &[f32], settings: Settings, philox: &Philox, counter: [u32; 3]) -> usize {
    let [prompt, sample, position] = counter;
    let mut best = (f64::NEG_INFINITY, 0);
    let mut take = |id: usize, word: u32| {
        let noise = -ln(-ln(unit_open(word)));
        let value = f64::from(logits[id] / settings.temperature) + noise;
        if value > best.0 {
            best = (value, id);
        }
    };
    if settings.top_k == 0 && settings.top_p == 1.0 {
        for first in (0..logits.len()).step_by(4) {
            let words = philox.block([prompt, sample, position, (first / 4) as u32]);
            for (id, word) in (first..logits.len()).zip(words) {
                take(id, word);
            }
        }
    } else {
        for id in kept(logits, settings) {
            take(id, philox.sampler_word(prompt, sample, position, id as u32));
        }
    }
    best.1
}

/// Ids that top-k, then top-p keep, ascending.
fn kept(logits: &[f32], settings: Settings) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    let descending = |&a: &usize, &b: &usize| logits[b].total_cmp(&logits[a]).then(a.cmp(&b));
    if settings.top_k > 0 && settings.top_k < ids.len() {
        ids.select_nth_unstable_by(settings.top_k - 1, descending);
        ids.truncate(settings.top_k);
    }
    ids.sort_unstable_by(descending);
    if settings.top_p < 1.0 {
        let tempered = |id: usize| f64::from(logits[id] / settings.temperature);
        let top = ids.first().map_or(0.0, |&id| tempered(id));
        let weights: Vec<f64> = ids
            .iter()
            .map(|&id| m3_spec::math::exp(tempered(id) - top))
            .collect();
        let wanted = f64::from(settings.top_p) * weights.iter().sum::<f64>();
        let mut mass = 0.0;
        let enough = weights.iter().position(|weight| {
            mass += weight;
            mass >= wanted
        });
        ids.truncate(enough.map_or(ids.len(), |last| last + 1));
    }
    ids.sort_unstable();
    ids
}

/// Log-probability of an id in the whole tempered distribution.
fn score(logits: &[f32], token: usize, temperature: f32) -> f32 {
    let mut exps = vec![0.0; VOCAB_TILE.min(logits.len())];
    let mut sums = TileSums::default();
    for tile in logits.chunks(VOCAB_TILE) {
        let mut tempered = tile.to_vec();
        sums = merge(
            sums,
            tile_sums(&mut tempered, &mut exps[..tile.len()], temperature),
        );
    }
    sums.log_prob(logits[token] / temperature)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backend;
    use crate::tensor::Tensor;

    const WHOLE: Settings = Settings {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
    };

    fn philox() -> Philox {
        Philox::new(42, Stream::Sampler)
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0, 1.0, 2.0, -1.0, 0.5];
        let total: f64 = logits.iter().map(|&z| f64::from(z).exp()).sum();
        let mut counts = [0u32; 5];
        for position in 0..20_000 {
            counts[draw(&logits, WHOLE, &philox(), [3, 1, position])] += 1;
        }
        for (count, logit) in counts.iter().zip(logits) {
            let share = f64::from(logit).exp() / total;
            // Four standard deviations of a binomial share.
            let bound = 4.0 * (share * (1.0 - share) / 20_000.0).sqrt();
            assert!(
                (f64::from(*count) / 20_000.0 - share).abs() <= bound,
                "{counts:?}"
            );
        }
    }

    #[test]
    fn top_k_and_top_p_keep_the_largest_and_the_lower_id_on_ties() {
        let logits = [1.0, 3.0, 3.0, 2.0, 3.0];
        let keep = |top_k, top_p| {
            kept(
                &logits,
                Settings {
                    top_k,
                    top_p,
                    ..WHOLE
                },
            )
        };
        assert_eq!(keep(2, 1.0), [1, 2]);
        assert_eq!(keep(0, 1e-6), [1]);
        assert_eq!(keep(4, 0.99), [1, 2, 3, 4]);
        assert_eq!(keep(9, 1.0), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_whole_draw_and_one_that_keeps_every_id_agree() {
        let logits: Vec<f32> = (0..37).map(|id| ((id * 7) % 11) as f32 * 0.3).collect();
        let all = Settings { top_k: 37, ..WHOLE };
        for position in 0..50 {
            let counter = [0, 2, position];
            assert_eq!(
                draw(&logits, WHOLE, &philox(), counter),
                draw(&logits, all, &philox(), counter)
            );
        }
    }

    /// Vector for other implementations: seed 42, prompt 5, sample 3, positions 0 to 7, logits (id · 5 mod 13) / 4.
    #[test]
    fn the_draws_of_a_seed_are_pinned() {
        let logits: Vec<f32> = (0..16).map(|id| ((id * 5) % 13) as f32 / 4.0).collect();
        let tokens: Vec<usize> = (0..8)
            .map(|position| draw(&logits, WHOLE, &philox(), [5, 3, position]))
            .collect();
        let slow = |position| {
            let noisy = |id: usize| {
                let word = philox().sampler_word(5, 3, position, id as u32);
                f64::from(logits[id]) - (-unit_open(word).ln()).ln()
            };
            (0..16)
                .max_by(|&a, &b| noisy(a).total_cmp(&noisy(b)))
                .unwrap()
        };
        assert_eq!(tokens, (0..8).map(slow).collect::<Vec<_>>());
    }

    #[test]
    fn greedy_looking_draws_report_a_log_probability_and_never_a_logit() {
        let backend = CpuBackend::default();
        let stream = backend.stream();
        let float = |values: &[f32], shape: [usize; 2]| {
            Tensor::from_slice(&backend, &stream, values, shape).unwrap()
        };
        let one = |value: f32| Tensor::from_slice(&backend, &stream, &[value], [1]).unwrap();
        let logits = float(&[1.0, 3.0], [1, 2]);
        let (temperature, top_p) = (one(1.0), one(1.0));
        let top_k = Tensor::from_slice(&backend, &stream, &[1i32], [1]).unwrap();
        let counters = Tensor::from_slice(&backend, &stream, &[0i32; 3], [1, 3]).unwrap();
        let tokens = Tensor::from_slice(&backend, &stream, &[-1i32], [1]).unwrap();
        let log_prob = one(0.0);
        let args = ops::Sample {
            logits: &logits,
            temperature: &temperature,
            top_k: &top_k,
            top_p: &top_p,
            counters: &counters,
            tokens: &tokens,
            log_prob: &log_prob,
            seed: 0,
        };
        backend.sample(&stream, &args).unwrap();
        assert_eq!(tokens.to_vec::<i32>(&backend, &stream).unwrap(), [1]);
        let reported = log_prob.to_vec::<f32>(&backend, &stream).unwrap()[0];
        assert!((reported + 0.126_928).abs() < 1e-6, "{reported}");
    }
}
