//! The digest by which weights are compared after every update.
//!
//! `digest_k = Σ_i splitmix64(seed_k, x_i) mod 2^64` for two seeds, where `x_i = rotl32(i) xor bits_i` and i is the
//! element's index in the *released* tensor. A sum is exact in any order, so slices, shards and buckets add up, on any
//! device. `bits` is the element's storage, zero-extended to 64 bits.

use crate::philox::splitmix64;
use half::bf16;
use std::fmt;
use std::ops::{Add, AddAssign};

/// Seeds of the two sums: the first fractional words of π and e.
pub const SEEDS: [u64; 2] = [0x243f_6a88_85a3_08d3, 0xb7e1_5162_8aed_2a6a];

/// What one element adds to the sum of `seed`: `index` counts in the released tensor.
#[inline]
pub const fn mix(seed: u64, bits: u32, index: u64) -> u64 {
    splitmix64(seed, index.rotate_left(32) ^ bits as u64)
}

/// Digest of a tensor or of any part of one; parts of a tensor add up with `+`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct Digest(pub [u64; 2]);

impl Digest {
    /// Adds one element.
    #[inline]
    pub fn update(&mut self, bits: u32, index: u64) {
        self.0[0] = self.0[0].wrapping_add(mix(SEEDS[0], bits, index));
        self.0[1] = self.0[1].wrapping_add(mix(SEEDS[1], bits, index));
    }

    /// Digest of consecutive elements, given by their bits, the first at `start`.
    pub fn of_bits(bits: impl IntoIterator<Item = u32>, start: u64) -> Self {
        let mut digest = Digest::default();
        for (offset, bits) in bits.into_iter().enumerate() {
            digest.update(bits, start + offset as u64);
        }
        digest
    }

    /// Digest of consecutive bf16 elements, the first at `start`.
    pub fn of_bf16(values: &[bf16], start: u64) -> Self {
        Self::of_bits(values.iter().map(|v| u32::from(v.to_bits())), start)
    }

    /// Digest of consecutive f32 elements, the first at `start`.
    pub fn of_f32(values: &[f32], start: u64) -> Self {
        Self::of_bits(values.iter().map(|v| v.to_bits()), start)
    }

    /// Digest of consecutive i32 elements, the first at `start`.
    pub fn of_i32(values: &[i32], start: u64) -> Self {
        Self::of_bits(values.iter().map(|&v| v as u32), start)
    }
}

impl Add for Digest {
    type Output = Digest;
    fn add(self, other: Digest) -> Digest {
        Digest([
            self.0[0].wrapping_add(other.0[0]),
            self.0[1].wrapping_add(other.0[1]),
        ])
    }
}

impl AddAssign for Digest {
    fn add_assign(&mut self, other: Digest) {
        *self = *self + other;
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.0[0], self.0[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| f32::from_bits(splitmix64(5, i as u64) as u32 >> 2))
            .collect()
    }

    /// Vectors for other implementations (CUDA, shards on other machines).
    #[test]
    fn test_vectors_hold() {
        let f32s = [1.0f32, -2.5, 0.0, -0.0];
        let bf16s = f32s.map(bf16::from_f32);
        let vectors = [
            (Digest::default(), "00000000000000000000000000000000"),
            (Digest::of_f32(&f32s, 0), "e1f30aeb59db71fc113b3e911cdc5a8c"),
            (
                Digest::of_f32(&f32s, 1 << 33),
                "91794a9c6cf609cf855270b4704ad86c",
            ),
            (
                Digest::of_bf16(&bf16s, 0),
                "b3b90ffbd0cd39321442779fe001fcb3",
            ),
            (
                Digest::of_i32(&[-1, 0, 7], 100),
                "126af162af848cddd259414a53ff6c2e",
            ),
        ];
        for (digest, expected) in vectors {
            assert_eq!(digest.to_string(), expected);
        }
    }

    #[test]
    fn slices_in_any_order_add_up_to_the_whole() {
        let v = values(1000);
        let whole = Digest::of_f32(&v, 0);
        let parts = [(700, 1000), (0, 1), (1, 300), (300, 700)];
        let sum = parts.iter().fold(Digest::default(), |sum, &(a, b)| {
            sum + Digest::of_f32(&v[a..b], a as u64)
        });
        assert_eq!(sum, whole);
    }

    #[test]
    fn one_flipped_bit_or_two_swapped_elements_show() {
        let v = values(300);
        let whole = Digest::of_f32(&v, 0);
        for i in 0..300 {
            for bit in 0..32 {
                let mut w = v.clone();
                w[i] = f32::from_bits(w[i].to_bits() ^ (1 << bit));
                let d = Digest::of_f32(&w, 0);
                assert!(d.0[0] != whole.0[0] && d.0[1] != whole.0[1]);
            }
        }
        let mut w = v;
        w.swap(17, 18);
        assert_ne!(Digest::of_f32(&w, 0), whole);
    }

    #[test]
    fn signed_zeros_and_shifted_starts_differ() {
        assert_ne!(Digest::of_f32(&[0.0], 0), Digest::of_f32(&[-0.0], 0));
        assert_ne!(Digest::of_f32(&[0.0], 0), Digest::of_f32(&[0.0], 1));
        assert_ne!(Digest::of_f32(&[0.0], 0), Digest::of_f32(&[0.0], 1 << 32));
    }
}
