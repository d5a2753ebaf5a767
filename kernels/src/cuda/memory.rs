//! Device memory: a limit, blocks that are used again, and a report.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, result};

use crate::error::{Error, Result};

/// Sizes are rounded up to this, so that blocks are used again more often. Every block starts at such an address.
const GRANULE: usize = 512;

/// Reference-counted device memory.
#[derive(Clone)]
pub struct CudaBuffer(Arc<Block>);

struct Block {
    address: u64,
    bytes: usize,
    pool: Arc<Pool>,
}

impl CudaBuffer {
    /// First byte, as the device sees it.
    pub(super) fn address(&self) -> u64 {
        self.0.address
    }

    /// Size, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.0.bytes
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.give_back(self.address, self.bytes);
    }
}

/// Where a GPU's memory stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Most bytes the backend may hold.
    pub limit_bytes: usize,
    /// Bytes in buffers that are alive.
    pub used_bytes: usize,
    /// Bytes kept to be used again.
    pub cached_bytes: usize,
    /// Most bytes that were ever in use.
    pub peak_bytes: usize,
}

/// Memory of one GPU.
pub(super) struct Pool {
    context: Arc<CudaContext>,
    device: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    report: MemoryReport,
    free: HashMap<usize, Vec<u64>>,
}

impl Pool {
    pub(super) fn new(context: Arc<CudaContext>, device: String, limit_bytes: usize) -> Arc<Self> {
        let mut state = State::default();
        state.report.limit_bytes = limit_bytes;
        Arc::new(Pool {
            context,
            device,
            state: Mutex::new(state),
        })
    }

    pub(super) fn report(&self) -> MemoryReport {
        self.lock().report
    }

    /// Zero-filled memory.
    pub(super) fn alloc(self: &Arc<Self>, bytes: usize) -> Result<CudaBuffer> {
        let buffer = self.take(bytes)?;
        let failed = |error| super::failed("alloc", format!("{bytes} bytes"), error);
        // What used the block before may still run on any stream, and no stream waits for the memset.
        self.context.synchronize().map_err(failed)?;
        // SAFETY: the block is this buffer's alone and at least `bytes` long.
        unsafe { result::memset_d8_sync(buffer.address(), 0, bytes) }.map_err(failed)?;
        self.context.synchronize().map_err(failed)?;
        Ok(buffer)
    }

    fn take(self: &Arc<Self>, bytes: usize) -> Result<CudaBuffer> {
        let size = rounded(bytes);
        let mut state = self.lock();
        let address = match state.free.get_mut(&size).and_then(Vec::pop) {
            Some(address) => {
                state.report.cached_bytes -= size;
                address
            }
            None => self.grow(&mut state, size, bytes)?,
        };
        state.report.used_bytes += size;
        state.report.peak_bytes = state.report.peak_bytes.max(state.report.used_bytes);
        Ok(CudaBuffer(Arc::new(Block {
            address,
            bytes,
            pool: self.clone(),
        })))
    }

    /// A new block; what is cached is given up before the request fails.
    fn grow(&self, state: &mut State, size: usize, asked: usize) -> Result<u64> {
        let full = || Error::OutOfMemory {
            device: self.device.clone(),
            bytes: asked,
        };
        let failed = |error| super::failed("alloc", format!("{asked} bytes"), error);
        self.context.bind_to_thread().map_err(failed)?;
        let limit = state.report.limit_bytes;
        if state.report.used_bytes + size > limit {
            return Err(full());
        }
        if state.report.used_bytes + state.report.cached_bytes + size > limit {
            self.trim(state);
        }
        // SAFETY: the context is current; the block is freed in `trim`.
        let first = unsafe { result::malloc_sync(size) };
        first.or_else(|_| {
            self.trim(state);
            // SAFETY: as above.
            unsafe { result::malloc_sync(size) }.map_err(|_| full())
        })
    }

    fn trim(&self, state: &mut State) {
        for (_, addresses) in state.free.drain() {
            for address in addresses {
                // SAFETY: allocated in `grow`, no buffer names it, and the driver waits for pending work. A failure
                // is reported by the next call that uses the device.
                let _ = unsafe { result::free_sync(address) };
            }
        }
        state.report.cached_bytes = 0;
    }

    fn give_back(&self, address: u64, bytes: usize) {
        let size = rounded(bytes);
        let mut state = self.lock();
        state.report.used_bytes -= size;
        state.report.cached_bytes += size;
        state.free.entry(size).or_default().push(address);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            for (_, addresses) in state.free.drain() {
                for address in addresses {
                    // SAFETY: as in `trim`; the pool is the last owner.
                    let _ = unsafe { result::free_sync(address) };
                }
            }
        }
    }
}

fn rounded(bytes: usize) -> usize {
    // A buffer of no bytes still has an address of its own.
    bytes.max(1).next_multiple_of(GRANULE)
}
