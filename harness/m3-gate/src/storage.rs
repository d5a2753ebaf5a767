//! How a tensor is stored, and distances counted in its representable values.

use serde::{Deserialize, Serialize};

/// Storage type of a tensor under judgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// bfloat16: 8 exponent bits, 7 stored mantissa bits.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// Signed 32-bit integers (ids, offsets).
    I32,
    /// Unsigned 32-bit integers.
    U32,
    /// Bytes.
    U8,
}

impl Storage {
    /// Lower-case name, as gate files and records spell it.
    pub fn name(self) -> &'static str {
        match self {
            Storage::Bf16 => "bf16",
            Storage::F32 => "f32",
            Storage::I32 => "i32",
            Storage::U32 => "u32",
            Storage::U8 => "u8",
        }
    }

    /// `x` rounded once, to nearest even, to a value this storage can hold; integers are kept.
    pub fn round(self, x: f64) -> f64 {
        match self {
            Storage::Bf16 => round_bf16(x),
            Storage::F32 => f64::from(x as f32),
            Storage::I32 | Storage::U32 | Storage::U8 => x,
        }
    }

    /// Representable values between `a` and `b` after rounding each once: 0 = same value, 1 = neighbours.
    ///
    /// Both signs of zero are one value. An infinity is never near a finite value, whatever the
    /// distance of their bits: the result is then `u64::MAX`, as it is for a NaN.
    pub fn ulp_distance(self, a: f64, b: f64) -> u64 {
        if a.is_nan() || b.is_nan() {
            return u64::MAX;
        }
        if a.is_infinite() || b.is_infinite() {
            return if a == b { 0 } else { u64::MAX };
        }
        self.ordered(a).abs_diff(self.ordered(b))
    }

    /// Bits of `x` as stored, in hexadecimal; integers in decimal.
    pub fn bits_text(self, x: f64) -> String {
        match self {
            Storage::Bf16 => format!("0x{:04x}", (self.round(x) as f32).to_bits() >> 16),
            Storage::F32 => format!("0x{:08x}", (x as f32).to_bits()),
            Storage::I32 | Storage::U32 | Storage::U8 => format!("{x}"),
        }
    }

    /// Position of `x` among the representable values, so that neighbours differ by one.
    fn ordered(self, x: f64) -> i64 {
        let bits = match self {
            Storage::Bf16 => (self.round(x) as f32).to_bits() >> 16,
            Storage::F32 => (x as f32).to_bits(),
            Storage::I32 | Storage::U32 | Storage::U8 => return x as i64,
        };
        let sign_bit = if self == Storage::Bf16 {
            1 << 15
        } else {
            1 << 31
        };
        let magnitude = i64::from(bits & (sign_bit - 1));
        if bits & sign_bit == 0 {
            magnitude
        } else {
            -magnitude
        }
    }
}

/// Straight from f64: going through f32 would round twice and miss ties that f64 can tell apart.
fn round_bf16(x: f64) -> f64 {
    const MANTISSA_BITS: i64 = 7;
    const EXPONENT_MIN: i64 = -126;
    if !x.is_finite() || x == 0.0 {
        return x;
    }
    let exponent = (((x.to_bits() >> 52) & 0x7ff) as i64 - 1023).max(EXPONENT_MIN);
    let step = f64::from_bits(((exponent - MANTISSA_BITS + 1023) as u64) << 52);
    let rounded = (x / step).round_ties_even() * step;
    let overflow = f64::from_bits((128 + 1023) << 52);
    if rounded.abs() >= overflow {
        f64::INFINITY.copysign(x)
    } else {
        rounded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_once_to_nearest_even() {
        assert_eq!(Storage::Bf16.round(16.0625), 16.0);
        assert_eq!(Storage::Bf16.round(1.0 + 1.5 / 128.0), 1.0 + 2.0 / 128.0);
        // A hair above the tie: f32 cannot hold the hair, so a path through f32 rounds down.
        assert_eq!(
            Storage::Bf16.round(1.0 + 0.5 / 128.0 + 1e-12),
            1.0 + 1.0 / 128.0
        );
        assert_eq!(
            Storage::Bf16.round(-1.0 - 0.5 / 128.0 - 1e-12),
            -1.0 - 1.0 / 128.0
        );
    }

    #[test]
    fn bf16_rounds_subnormals_and_overflows_at_the_right_place() {
        let smallest = 2f64.powi(-133);
        assert_eq!(Storage::Bf16.round(smallest), smallest);
        assert_eq!(Storage::Bf16.round(smallest * 0.5), 0.0);
        let largest = (2.0 - 1.0 / 128.0) * 2f64.powi(127);
        assert_eq!(Storage::Bf16.round(largest), largest);
        assert_eq!(
            Storage::Bf16.round((2.0 - 1.0 / 256.0) * 2f64.powi(127)),
            f64::INFINITY
        );
        assert_eq!(Storage::Bf16.round(-1e300), f64::NEG_INFINITY);
    }

    #[test]
    fn ulp_distance_counts_representable_values_across_zero() {
        let tiny = 2f64.powi(-133);
        assert_eq!(Storage::Bf16.ulp_distance(-tiny, tiny), 2);
        assert_eq!(Storage::Bf16.ulp_distance(-0.0, 0.0), 0);
        assert_eq!(Storage::Bf16.ulp_distance(1.0, 1.0 + 1.0 / 128.0), 1);
        assert_eq!(Storage::F32.ulp_distance(1.0, f64::from(1f32.next_up())), 1);
        assert_eq!(Storage::I32.ulp_distance(-1.0, 3.0), 4);
    }

    #[test]
    fn infinity_is_never_near_a_finite_value() {
        for storage in [Storage::Bf16, Storage::F32] {
            assert_eq!(storage.ulp_distance(f64::INFINITY, 1.0), u64::MAX);
            assert_eq!(
                storage.ulp_distance(f64::from(f32::MAX), f64::INFINITY),
                u64::MAX
            );
            assert_eq!(
                storage.ulp_distance(f64::NEG_INFINITY, f64::INFINITY),
                u64::MAX
            );
            assert_eq!(storage.ulp_distance(f64::INFINITY, f64::INFINITY), 0);
            assert_eq!(storage.ulp_distance(f64::NAN, f64::NAN), u64::MAX);
        }
    }

    #[test]
    fn bits_are_those_of_the_stored_value() {
        assert_eq!(Storage::Bf16.bits_text(-1.25), "0xbfa0");
        assert_eq!(Storage::F32.bits_text(1.0), "0x3f800000");
        assert_eq!(Storage::I32.bits_text(-1.0), "-1");
    }
}
