//! The table of rotary cosines and sines that reference, twin and every backend take as an input.
//!
//! - `inv_freq[i] = 1 / θ^(2i / rotary_dim)` in f32. The divisor is the rotary dim, not the head dim.
//! - `angle = f32(position) · inv_freq[i]`, one f32 product.
//! - `cos` and `sin` of that angle are evaluated in f64 and rounded once to f32.
//!
//! Pairs are (i, i + rotary_dim/2): half-split inside the rotary slice, not interleaved.

use crate::math;

/// Positions below 2^20 are exact in f32 and keep every angle inside the domain of [`math::sin_cos`].
pub const MAX_POSITIONS: usize = 1 << 20;

const PINNED_ROTARY_DIM: usize = 64;

/// Bits of `1.0 / 5e6 ** (torch.arange(0, 64, 2).float() / 64)` as torch 2.11.0 evaluates it on a CPU; the same bits
/// as a correctly rounded f32 power followed by a correctly rounded division. At position 2^20 one ulp of the second
/// entry turns by 0.06 rad, so the entries are pinned instead of evaluated.
const INV_FREQ_BITS_5E6: [u32; 32] = [
    0x3f80_0000,
    0x3f1e_165d,
    0x3ec3_3f3a,
    0x3e71_2429,
    0x3e14_e963,
    0x3db7_ea1a,
    0x3d63_251b,
    0x3d0c_44bf,
    0x3cad_3d5e,
    0x3c55_f605,
    0x3c04_2088,
    0x3ba3_2f3e,
    0x3b49_8ad3,
    0x3af8_ea93,
    0x3a99_b686,
    0x3a3d_d829,
    0x39ea_77ff,
    0x3990_ca8b,
    0x3932_d34f,
    0x38dc_dc14,
    0x3888_6320,
    0x3828_7230,
    0x37d0_0a62,
    0x3780_7896,
    0x371e_ab4b,
    0x36c3_f72a,
    0x3672_0755,
    0x3615_75ab,
    0x35b8_975d,
    0x3563_fb18,
    0x350c_c8e3,
    0x34ad_e091,
];

/// The same for θ = 1e7.
const INV_FREQ_BITS_1E7: [u32; 32] = [
    0x3f80_0000,
    0x3f1a_b32b,
    0x3eba_f81b,
    0x3e61_f835,
    0x3e08_8d77,
    0x3da5_0956,
    0x3d47_763f,
    0x3cf1_1177,
    0x3c91_ad39,
    0x3c30_1052,
    0x3bd4_ca15,
    0x3b80_967d,
    0x3b1b_690d,
    0x3abb_d3ed,
    0x3a63_01e2,
    0x3a09_2e02,
    0x39a5_cb60,
    0x3948_60c1,
    0x38f2_2ce2,
    0x3892_587e,
    0x3830_df52,
    0x37d5_c441,
    0x3781_2dab,
    0x371c_1fc4,
    0x36bc_b0c1,
    0x3664_0cc6,
    0x3609_cf4a,
    0x35a6_8e4c,
    0x3549_4c57,
    0x34f3_499d,
    0x3493_048e,
    0x3431_af44,
];

/// The `rotary_dim / 2` inverse frequencies: pinned constants for rotary dim 64 at θ = 5e6 and 1e7, else the f64
/// power rounded once to f32.
pub fn inv_freq(theta: f64, rotary_dim: usize) -> Vec<f32> {
    let pinned = match (rotary_dim, theta) {
        (PINNED_ROTARY_DIM, 5e6) => Some(&INV_FREQ_BITS_5E6),
        (PINNED_ROTARY_DIM, 1e7) => Some(&INV_FREQ_BITS_1E7),
        _ => None,
    };
    match pinned {
        Some(bits) => bits.iter().map(|&b| f32::from_bits(b)).collect(),
        None => power_inv_freq(theta, rotary_dim),
    }
}

fn power_inv_freq(theta: f64, rotary_dim: usize) -> Vec<f32> {
    (0..rotary_dim / 2)
        .map(|i| math::pow(theta, -((2 * i) as f64) / rotary_dim as f64) as f32)
        .collect()
}

/// Cosines and sines of every position and frequency.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryTable {
    /// Base θ of the frequencies.
    pub theta: f64,
    /// Leading dims of a head that are rotated; even.
    pub rotary_dim: usize,
    /// Number of positions in the table.
    pub max_positions: usize,
    /// `[max_positions][rotary_dim / 2][2]`, the last axis being (cos, sin).
    pub cos_sin: Vec<f32>,
}

impl RotaryTable {
    /// The table of positions `0..max_positions`.
    ///
    /// # Panics
    /// If `rotary_dim` is odd or `max_positions` exceeds [`MAX_POSITIONS`]; a parsed config has neither.
    pub fn new(theta: f64, rotary_dim: usize, max_positions: usize) -> Self {
        assert!(
            rotary_dim.is_multiple_of(2),
            "rotary_dim {rotary_dim} is odd"
        );
        assert!(
            max_positions <= MAX_POSITIONS,
            "{max_positions} positions, at most {MAX_POSITIONS}"
        );
        let inv_freq = inv_freq(theta, rotary_dim);
        let mut cos_sin = Vec::with_capacity(max_positions * rotary_dim);
        for position in 0..max_positions {
            for &frequency in &inv_freq {
                let angle = position as f32 * frequency;
                let (sin, cos) = math::sin_cos(f64::from(angle));
                cos_sin.extend([cos as f32, sin as f32]);
            }
        }
        RotaryTable {
            theta,
            rotary_dim,
            max_positions,
            cos_sin,
        }
    }

    /// (cos, sin) of one position and pair; `pair < rotary_dim / 2`.
    pub fn at(&self, position: usize, pair: usize) -> (f32, f32) {
        let start = position * self.rotary_dim + 2 * pair;
        (self.cos_sin[start], self.cos_sin[start + 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_frequencies_are_within_two_ulps_of_the_power() {
        for theta in [5e6, 1e7] {
            for (pinned, power) in inv_freq(theta, 64)
                .into_iter()
                .zip(power_inv_freq(theta, 64))
            {
                assert!(
                    pinned.to_bits().abs_diff(power.to_bits()) <= 2,
                    "{pinned:e} {power:e}"
                );
            }
        }
    }

    #[test]
    fn the_divisor_is_the_rotary_dim() {
        let frequencies = inv_freq(1e4, 4);
        assert_eq!(frequencies, vec![1.0, 0.01]);
    }

    #[test]
    fn position_zero_is_the_identity() {
        let table = RotaryTable::new(5e6, 64, 3);
        assert_eq!(table.cos_sin.len(), 3 * 64);
        for pair in 0..32 {
            assert_eq!(table.at(0, pair), (1.0, 0.0));
        }
    }

    #[test]
    fn position_five_at_frequency_one_turns_by_five_radians() {
        let (cos, sin) = RotaryTable::new(1e7, 64, 6).at(5, 0);
        assert!(
            (cos - 0.283_662_2).abs() < 1e-7 && (sin + 0.958_924_3).abs() < 1e-7,
            "{cos} {sin}"
        );
    }

    #[test]
    fn entries_are_the_f64_functions_of_the_f32_angle_rounded_once() {
        let table = RotaryTable::new(5e6, 64, 5000);
        for (position, pair) in [(1, 1), (4999, 0), (4999, 1), (2048, 7), (127, 31)] {
            let angle = f64::from(position as f32 * f32::from_bits(INV_FREQ_BITS_5E6[pair]));
            assert_eq!(
                table.at(position, pair),
                (angle.cos() as f32, angle.sin() as f32)
            );
        }
    }
}
