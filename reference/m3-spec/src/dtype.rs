//! The dtypes that a tensor can have, at rest or in a buffer.

use std::fmt;

/// A storage dtype.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// The upper half of a binary32: 8 bits of significand, 8 of exponent.
    BF16,
    /// Signed 32-bit: ids, offsets, `cu_seqlens`.
    I32,
    /// Unsigned 32-bit: RNG words.
    U32,
    /// Unsigned 64-bit: digests, counters.
    U64,
    /// Bytes: flags, packed quantised formats.
    U8,
}

impl DType {
    /// Size of an element, in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::BF16 => 2,
            DType::U8 => 1,
        }
    }

    /// Whether elements are floating-point numbers.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::BF16)
    }

    /// The lower-case name used in records and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::DType;

    #[test]
    fn serde_name_equals_display_name() {
        for dtype in [
            DType::F32,
            DType::BF16,
            DType::I32,
            DType::U32,
            DType::U64,
            DType::U8,
        ] {
            assert_eq!(
                serde_json::to_string(&dtype).unwrap(),
                format!("\"{dtype}\"")
            );
        }
    }
}
