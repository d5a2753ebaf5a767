//! Seeded inputs of test cases.
//!
//! An element depends on the seed, the tensor's label and the element's index alone: Philox stream
//! [`Stream::CaseInputs`], counter (index of the draw, label). So a slice of a tensor can be made without the rest, and
//! a failure is repeated from its seed on any machine. Only IEEE-exact operations and [`crate::math`] are used.

use crate::dtype::DType;
use crate::math;
use crate::philox::{Philox, Stream, splitmix64};
use crate::round::{bf16_of, to_dtype};
use half::bf16;

/// How the elements of a seeded tensor are distributed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// Normal with mean 0 and this standard deviation (Box–Muller).
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform on [lo, hi) from 53 random bits.
    Uniform {
        /// Lower end, possible.
        lo: f64,
        /// Upper end, reached only by rounding to the storage dtype.
        hi: f64,
    },
    /// For wide ranges: half of the draws are [`Distribution::Uniform`], the others have a uniform *exponent* between 2^-24
    /// and that of the larger end, a full random significand and an allowed sign, so that fractions and values below one
    /// appear however wide the range is. A draw outside [lo, hi) falls back to the uniform one.
    Wide {
        /// Lower end.
        lo: f64,
        /// Upper end.
        hi: f64,
    },
    /// [`EDGE_VALUES`] over and over, each for one element, the order shifted by the seed.
    Edges,
}

/// Values at which storage, rounding and comparison go wrong first; every case list should hold some of them.
pub const EDGE_VALUES: [f64; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    f64::from_bits((1023 - 149) << 52), // smallest f32 subnormal, zero in bf16
    f64::from_bits((1023 - 133) << 52), // smallest bf16 subnormal
    -f64::from_bits((1023 - 133) << 52),
    f64::from_bits((1023 - 126) << 52), // smallest normal
    1.0 + 1.0 / 256.0,                  // bf16 tie, to the even neighbour below
    1.0 + 3.0 / 256.0,                  // bf16 tie, to the even neighbour above
    -(1.0 + 1.0 / 256.0),
    256.5,    // between integers that bf16 cannot tell apart
    257.0,    // bf16 tie among integers
    65_504.0, // largest f16
    1.0 / 3.0,
    3.389_531_389_251_535_5e38, // largest finite bf16
];

/// The maker of one case's seeded tensors.
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    philox: Philox,
    case: u64,
}

impl Inputs {
    /// Tensors of the case `case` under `seed`; another case name gives other values.
    pub fn new(seed: u64, case: &str) -> Self {
        Inputs::on_stream(seed, Stream::CaseInputs, case)
    }

    /// The same draws on another stream: initial parameters are seeded tensors too.
    pub fn on_stream(seed: u64, stream: Stream, case: &str) -> Self {
        Inputs {
            philox: Philox::new(seed, stream),
            case: hash(0, case),
        }
    }

    /// Element `index` of tensor `label`, not rounded.
    pub fn element(&self, label: &str, distribution: Distribution, index: u64) -> f64 {
        self.labelled(label).element(distribution, index)
    }

    /// The first `len` elements of tensor `label`, each rounded once to `dtype`.
    pub fn f64s(
        &self,
        label: &str,
        distribution: Distribution,
        dtype: DType,
        len: usize,
    ) -> Vec<f64> {
        let draws = self.labelled(label);
        (0..len as u64)
            .map(|i| to_dtype(draws.element(distribution, i), dtype))
            .collect()
    }

    /// The same as f32 storage.
    pub fn f32s(&self, label: &str, distribution: Distribution, len: usize) -> Vec<f32> {
        let draws = self.labelled(label);
        (0..len as u64)
            .map(|i| draws.element(distribution, i) as f32)
            .collect()
    }

    /// The same as bf16 storage, rounded once from f64.
    pub fn bf16s(&self, label: &str, distribution: Distribution, len: usize) -> Vec<bf16> {
        let draws = self.labelled(label);
        (0..len as u64)
            .map(|i| bf16_of(draws.element(distribution, i)))
            .collect()
    }

    /// `len` integers uniform on [0, bound), for token ids and lengths.
    ///
    /// # Panics
    /// If `bound` is 0.
    pub fn integers(&self, label: &str, bound: u32, len: usize) -> Vec<u32> {
        assert!(bound > 0, "no integer lies below 0");
        let draws = self.labelled(label);
        // The high half of a 64 x 32 bit product: a bias below 2^-32.
        (0..len as u64)
            .map(|i| ((u128::from(draws.pair(i)[0]) * u128::from(bound)) >> 64) as u32)
            .collect()
    }

    fn labelled(&self, label: &str) -> Draws {
        Draws {
            philox: self.philox,
            label: hash(self.case, label),
        }
    }
}

/// The draws of one labelled tensor.
struct Draws {
    philox: Philox,
    label: u64,
}

impl Draws {
    /// Two 64-bit words of draw number `draw`.
    fn pair(&self, draw: u64) -> [u64; 2] {
        let counter = [
            draw as u32,
            (draw >> 32) as u32,
            self.label as u32,
            (self.label >> 32) as u32,
        ];
        let w = self.philox.block(counter);
        [
            u64::from(w[1]) << 32 | u64::from(w[0]),
            u64::from(w[3]) << 32 | u64::from(w[2]),
        ]
    }

    fn element(&self, distribution: Distribution, index: u64) -> f64 {
        match distribution {
            Distribution::Normal { std } => std * self.normal(index),
            Distribution::Uniform { lo, hi } => uniform(self.pair(index)[0], lo, hi),
            Distribution::Wide { lo, hi } => wide(self.pair(index), lo, hi),
            Distribution::Edges => {
                let shift = self.pair(0)[0] % EDGE_VALUES.len() as u64;
                EDGE_VALUES[((index + shift) % EDGE_VALUES.len() as u64) as usize]
            }
        }
    }

    /// Box–Muller: elements 2n and 2n + 1 are the cosine and the sine branch of draw n.
    fn normal(&self, index: u64) -> f64 {
        let [a, b] = self.pair(index / 2);
        let radius = (-2.0 * math::ln(unit_53(a) + HALF_UNIT)).sqrt();
        let (sin, cos) = math::sin_cos(unit_53(b) * std::f64::consts::TAU);
        radius * if index.is_multiple_of(2) { cos } else { sin }
    }
}

const UNIT: f64 = 1.0 / (1u64 << 53) as f64;
/// Keeps the argument of the logarithm above zero.
const HALF_UNIT: f64 = 0.5 * UNIT;

/// The upper 53 bits as a number in [0, 1).
fn unit_53(word: u64) -> f64 {
    (word >> 11) as f64 * UNIT
}

fn uniform(word: u64, lo: f64, hi: f64) -> f64 {
    lo + unit_53(word) * (hi - lo)
}

/// Smallest exponent that [`Distribution::Wide`] reaches.
const WIDE_EXPONENT_MIN: i64 = -24;

fn wide(words: [u64; 2], lo: f64, hi: f64) -> f64 {
    let fallback = uniform(words[0], lo, hi);
    let largest = if lo.abs() > hi.abs() {
        lo.abs()
    } else {
        hi.abs()
    };
    let exponent_max = (largest.to_bits() >> 52) as i64 - 1023;
    let choices = exponent_max - WIDE_EXPONENT_MIN + 1;
    if words[1] & 1 == 0 || choices <= 0 {
        return fallback;
    }
    let exponent = WIDE_EXPONENT_MIN + ((words[1] >> 2) % choices as u64) as i64;
    let magnitude = f64::from_bits(((1023 + exponent) as u64) << 52 | words[0] >> 12);
    let value = if words[1] & 2 == 0 {
        magnitude
    } else {
        -magnitude
    };
    [value, -value]
        .into_iter()
        .find(|v| (lo..hi).contains(v))
        .unwrap_or(fallback)
}

/// A 64-bit hash of a name, chained from `start`: one splitmix64 step a byte.
fn hash(start: u64, name: &str) -> u64 {
    name.bytes()
        .fold(start, |h, byte| splitmix64(h, u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NORMAL: Distribution = Distribution::Normal { std: 1.0 };

    #[test]
    fn normal_has_the_moments_of_a_normal() {
        let n = 200_000;
        let v = Inputs::new(1, "moments").f64s("x", NORMAL, DType::F32, n);
        let mean = v.iter().sum::<f64>() / n as f64;
        let moment = |p| v.iter().map(|x| (x - mean).powi(p)).sum::<f64>() / n as f64;
        // Four standard errors each: 1/√n, √(2/n), √(15/n), √(96/n).
        let bound = |var: f64| 4.0 * (var / n as f64).sqrt();
        assert!(mean.abs() < bound(1.0) && (moment(2) - 1.0).abs() < bound(2.0));
        assert!(moment(3).abs() < bound(15.0) && (moment(4) - 3.0).abs() < bound(96.0));
        let beyond_two = v.iter().filter(|x| x.abs() > 1.959_964).count() as f64 / n as f64;
        assert!((beyond_two - 0.05).abs() < bound(0.05));
    }

    #[test]
    fn elements_depend_on_seed_case_label_and_index_alone() {
        let inputs = Inputs::new(3, "case");
        let long = inputs.f32s("q", NORMAL, 100);
        assert_eq!(long[..37], inputs.f32s("q", NORMAL, 37)[..]);
        assert_eq!(long[99], inputs.element("q", NORMAL, 99) as f32);
        assert_ne!(long, inputs.f32s("k", NORMAL, 100));
        assert_ne!(long, Inputs::new(4, "case").f32s("q", NORMAL, 100));
        assert_ne!(long, Inputs::new(3, "other").f32s("q", NORMAL, 100));
    }

    #[test]
    fn first_normals_of_seed_zero_are_written_down() {
        let bits: Vec<u64> = (0..4)
            .map(|i| Inputs::new(0, "vector").element("x", NORMAL, i).to_bits())
            .collect();
        assert_eq!(
            bits,
            [
                0x3fb1_fedc_0559_aef2,
                0xbff1_f412_26a1_8be4,
                0x3ff4_5949_4de4_d93e,
                0xbfe0_47dc_f3a8_d6d4
            ]
        );
    }

    #[test]
    fn a_wide_range_yields_fractions_and_values_below_one() {
        let hi = 16_777_216.0;
        let v = Inputs::new(0, "wide").f32s("x", Distribution::Wide { lo: 0.0, hi }, 10_000);
        assert!(v.iter().all(|&x| (0.0..=hi as f32).contains(&x)));
        assert!(v.iter().filter(|x| x.fract() != 0.0).count() > 1000);
        assert!(v.iter().filter(|x| **x < 1.0).count() > 1000);
        assert!(v.iter().filter(|x| **x > 8_388_608.0).count() > 1000);
    }

    #[test]
    fn wide_keeps_to_ranges_without_zero_and_to_tiny_ones() {
        for (lo, hi) in [(5.0, 6.0), (-3.0, -2.0), (-1e-12, 1e-12), (-1e30, 1e-3)] {
            for x in
                Inputs::new(0, "ranges").f64s("x", Distribution::Wide { lo, hi }, DType::U8, 2000)
            {
                assert!((lo..hi).contains(&x), "{x:e} outside [{lo:e}, {hi:e})");
            }
        }
    }

    #[test]
    fn uniform_uses_the_low_bits_of_the_significand() {
        let v = Inputs::new(0, "bits").f32s("x", Distribution::Uniform { lo: 0.0, hi: 1.0 }, 1000);
        for bit in 0..23 {
            let ones = v.iter().filter(|x| x.to_bits() >> bit & 1 == 1).count();
            assert!(
                (350..=650).contains(&ones),
                "bit {bit} set in {ones} of 1000"
            );
        }
    }

    #[test]
    fn edge_values_all_appear_whatever_the_shift() {
        let v =
            Inputs::new(9, "edges").f64s("x", Distribution::Edges, DType::U8, EDGE_VALUES.len());
        for edge in EDGE_VALUES {
            assert!(v.iter().any(|x| x.to_bits() == edge.to_bits()), "{edge:e}");
        }
        let bf16s = Inputs::new(9, "edges").bf16s("x", Distribution::Edges, EDGE_VALUES.len());
        assert!(bf16s.iter().all(|x| x.is_finite()));
        assert!(bf16s.contains(&bf16::MAX));
    }

    #[test]
    fn integers_cover_their_range_and_stay_inside() {
        let v = Inputs::new(2, "ids").integers("token", 7, 1000);
        for want in 0..7 {
            assert!(v.contains(&want));
        }
        assert!(v.iter().all(|&x| x < 7));
    }
}
