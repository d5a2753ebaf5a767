//! The paged cache: which page of which sequence lies where. A page is one key block.

use m3_kernels::tensor::as_bytes;
use m3_kernels::{Backend, Tensor};
use m3_model::{Cache, LayerPages};
use m3_spec::config::{AttentionKind, TextConfig};
use m3_spec::dtype::DType;

use crate::error::{Error, Result};

/// Page of a model without sparse layers.
const DENSE_PAGE: usize = 128;

/// Entry of the page table where a sequence has no page yet.
const NO_PAGE: i32 = -1;

/// Pages of a set of sequences.
pub struct PagedCache<B: Backend> {
    /// What the model reads.
    pub cache: Cache<B>,
    page: usize,
    max_pages: usize,
    table: Vec<i32>,
    free: Vec<i32>,
}

impl<B: Backend> PagedCache<B> {
    /// Room for `slots` sequences of up to `longest` tokens.
    ///
    /// # Errors
    /// What the device reports.
    pub fn new(
        backend: &B,
        config: &TextConfig,
        dtype: DType,
        slots: usize,
        longest: usize,
    ) -> Result<Self> {
        let page = config
            .index
            .as_ref()
            .map_or(DENSE_PAGE, |index| index.block_size);
        let max_pages = longest.div_ceil(page).max(1);
        let pages = slots * max_pages;
        let kv = || {
            Tensor::zeros(
                backend,
                dtype,
                [pages, page, config.num_kv_heads, config.head_dim],
            )
        };
        let layer = |attention: &AttentionKind| -> Result<LayerPages<B>> {
            let index = config
                .index
                .as_ref()
                .filter(|_| *attention == AttentionKind::Sparse);
            let index_k = match index {
                Some(index) => Some(Tensor::zeros(
                    backend,
                    dtype,
                    [pages, page, 1, index.head_dim],
                )?),
                None => None,
            };
            Ok(LayerPages {
                k: kv()?,
                v: kv()?,
                index_k,
            })
        };
        let layers = config.attention.iter().map(layer).collect::<Result<_>>()?;
        let page_table = Tensor::zeros(backend, DType::I32, [slots, max_pages])?;
        let table = vec![NO_PAGE; slots * max_pages];
        // Handed out from the back, lowest first.
        let free = (0..pages as i32).rev().collect();
        Ok(PagedCache {
            cache: Cache { page_table, layers },
            page,
            max_pages,
            table,
            free,
        })
    }

    /// Gives slot `slot` pages for `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Input`] when the slot's or the cache's pages do not suffice.
    pub fn reserve(&mut self, slot: usize, tokens: usize) -> Result<()> {
        let needed = tokens.div_ceil(self.page);
        if needed > self.max_pages {
            let room = self.max_pages * self.page;
            return Err(Error::Input(format!(
                "{tokens} tokens exceed the cache's {room} a sequence"
            )));
        }
        for entry in &mut self.table[slot * self.max_pages..slot * self.max_pages + needed] {
            if *entry == NO_PAGE {
                let page = self.free.pop();
                *entry = page.ok_or_else(|| Error::Input("the cache has no free page".into()))?;
            }
        }
        Ok(())
    }

    /// Takes all pages of a slot back.
    pub fn release(&mut self, slot: usize) {
        for entry in &mut self.table[slot * self.max_pages..(slot + 1) * self.max_pages] {
            if *entry != NO_PAGE {
                self.free.push(std::mem::replace(entry, NO_PAGE));
            }
        }
    }

    /// Brings the page table to the device.
    ///
    /// # Errors
    /// What the device reports.
    pub fn upload(&self, backend: &B, stream: &B::Stream) -> Result<()> {
        Ok(backend.upload(stream, &self.cache.page_table, as_bytes(&self.table))?)
    }
}

#[cfg(test)]
mod tests {
    use m3_kernels::cpu::CpuBackend;
    use m3_spec::config::Config;

    use super::*;

    #[test]
    fn a_released_page_is_found_again_and_a_full_cache_says_so() {
        let backend = CpuBackend::default();
        let config = Config::tiny().text;
        let mut cache = PagedCache::new(&backend, &config, DType::F32, 2, 40).unwrap();
        cache.reserve(0, 33).unwrap();
        cache.reserve(1, 48).unwrap();
        assert_eq!(cache.table, [0, 1, 2, 3, 4, 5]);
        let refused = cache.reserve(1, 49).unwrap_err().to_string();
        assert_eq!(refused, "49 tokens exceed the cache's 48 a sequence");
        cache.release(0);
        cache.reserve(0, 1).unwrap();
        assert_eq!(cache.table, [2, -1, -1, 3, 4, 5]);
    }
}
