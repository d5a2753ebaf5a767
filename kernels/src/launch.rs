//! Launch and tile configurations: one pure function of (block, head_dim, group, arch).
//!
//! The key tile decides the bits of attention, because partial results are combined per key tile in ascending order.
//! It is therefore the same in the dense and the sparse layers of a model, in prefill and in decode.

/// What a configuration is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// The CPU backend.
    Cpu,
    /// A GPU of this compute capability, e.g. 90 for Hopper.
    Sm(u32),
}

/// Tiles of one attention shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionConfig {
    /// Keys per tile, counted from the sequence's start.
    pub key_tile: usize,
    /// Queries per task.
    pub query_tile: usize,
    /// Slices over which the query heads of one kv head are split for dK and dV; summed in order.
    pub head_splits: usize,
}

/// Widest key tile the CPU backend walks: K and V tiles of head_dim 256 in fp32 stay within a 2 MiB L2 cache.
const CPU_KEY_TILE_MAX: usize = 128;

/// Narrowest key tile: below it the micro-kernel's register tile would run half empty.
const CPU_KEY_TILE_MIN: usize = 32;

/// Tiles for key blocks of `block` tokens, `head_dim` channels and `group` query heads per kv head.
///
/// A block wider than a tile is walked in several tiles, a narrower one is masked inside its tile; `key_tile` and
/// `block` always divide one another or the tile is the block rounded up to `CPU_KEY_TILE_MIN`.
pub fn attention(block: usize, head_dim: usize, group: usize, arch: Arch) -> AttentionConfig {
    match arch {
        Arch::Cpu | Arch::Sm(_) => {
            let widest = if head_dim > 128 {
                CPU_KEY_TILE_MAX / 2
            } else {
                CPU_KEY_TILE_MAX
            };
            let key_tile = block.clamp(CPU_KEY_TILE_MIN, widest);
            AttentionConfig {
                key_tile,
                query_tile: 64,
                head_splits: if group >= 8 { 2 } else { 1 },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_the_published_shapes() {
        let m3 = attention(128, 128, 16, Arch::Cpu);
        assert_eq!((m3.key_tile, m3.head_splits), (128, 2));
        let qsa = attention(4, 256, 12, Arch::Cpu);
        assert_eq!((qsa.key_tile, qsa.head_splits), (32, 2));
    }
}
