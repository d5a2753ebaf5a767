//! A place beside the final files where a checkpoint is put together, so that nothing half-written is ever found.
//!
//! The files are made in [`STAGING_DIR`] inside the destination and renamed into it at the end, `config.json` last: a
//! directory with a `config.json` is finished, one with [`STAGING_DIR`] and none is not. A lock on a file in there tells a
//! writer at work (in any process) from the leftovers of one that was killed, which the next writer removes.

use crate::error::{Error, Result};
use crate::files::{CONFIG_FILE, INDEX_FILE, SINGLE_FILE};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// Name of the staging directory.
pub const STAGING_DIR: &str = ".m3-unfinished";
const LOCK_FILE: &str = "lock";

/// The staging directory of one writer; dropped, it takes everything unfinished with it.
pub struct Staging {
    dir: PathBuf,
    data_bytes: u64,
    made_dir: bool,
    moved: Vec<PathBuf>,
    finished: bool,
    _lock: File,
}

impl Staging {
    /// Takes `dir`, which need not exist, for one writer of `data_bytes` bytes of tensors.
    ///
    /// # Errors
    /// [`Error::Exists`] when it holds a checkpoint, [`Error::Busy`] when another writer has it, and write errors.
    pub fn new(dir: &Path, data_bytes: u64) -> Result<Self> {
        let has_leftovers = dir.join(STAGING_DIR).is_dir();
        refuse_existing(dir, has_leftovers)?;
        let made_dir = !dir.exists();
        let lock = lock(dir, data_bytes).inspect_err(|_| remove_if_empty(dir, made_dir))?;
        let staging = Staging {
            _lock: lock,
            dir: dir.to_owned(),
            data_bytes,
            made_dir,
            moved: Vec::new(),
            finished: false,
        };
        // Another writer may have finished before the lock was ours.
        refuse_existing(dir, has_leftovers)?;
        staging.remove_leftovers()?;
        Ok(staging)
    }

    /// Where the file that will be called `name` is put together.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(STAGING_DIR).join(name)
    }

    /// What a file will be called in the end, for messages.
    pub fn final_path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Renames `names` into the destination, and last `marker`, which says that it is finished.
    pub fn finish(mut self, names: &[&str], marker: &str) -> Result<()> {
        for name in names {
            self.rename(name)?;
        }
        self.sync()?;
        self.rename(marker)?;
        self.finished = true;
        self.sync()
    }

    fn rename(&mut self, name: &str) -> Result<()> {
        let target = self.final_path(name);
        fs::rename(self.path(name), &target).map_err(|e| self.write_error(&target, e))?;
        self.moved.push(target);
        Ok(())
    }

    /// The error of a failed write to `path`.
    pub fn write_error(&self, path: &Path, source: io::Error) -> Error {
        write_error(path, source, self.data_bytes)
    }

    /// Makes the renames durable.
    fn sync(&self) -> Result<()> {
        let synced = File::open(&self.dir).and_then(|dir| dir.sync_all());
        synced.map_err(|e| self.write_error(&self.dir, e))
    }

    /// Removes what a killed writer left. No checkpoint file was here when that one began, so all are its own.
    fn remove_leftovers(&self) -> Result<()> {
        let staging = self.dir.join(STAGING_DIR);
        for path in files_in(&staging).map_err(|e| self.write_error(&staging, e))? {
            if path.file_name().is_some_and(|name| name != LOCK_FILE) {
                fs::remove_file(&path).map_err(|e| self.write_error(&path, e))?;
            }
        }
        while let Some(path) = weights_file(&self.dir) {
            fs::remove_file(&path).map_err(|e| self.write_error(&path, e))?;
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Best effort: what cannot be removed here, the next writer removes.
        if !self.finished {
            for path in &self.moved {
                let _ = fs::remove_file(path);
            }
        }
        let _ = fs::remove_dir_all(self.dir.join(STAGING_DIR));
        remove_if_empty(&self.dir, self.made_dir);
    }
}

/// Removes what is empty of the staging directory and, if this writer made it, the destination.
fn remove_if_empty(dir: &Path, made_dir: bool) {
    let _ = fs::remove_dir(dir.join(STAGING_DIR));
    if made_dir {
        let _ = fs::remove_dir(dir);
    }
}

fn lock(dir: &Path, data_bytes: u64) -> Result<File> {
    let staging = dir.join(STAGING_DIR);
    fs::create_dir_all(&staging).map_err(|e| write_error(dir, e, data_bytes))?;
    let path = staging.join(LOCK_FILE);
    let lock = File::create(&path).map_err(|e| write_error(&path, e, data_bytes))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(Error::Busy {
            dir: dir.to_owned(),
        }),
        Err(TryLockError::Error(e)) => Err(write_error(&path, e, data_bytes)),
    }
}

/// Refuses a directory with a checkpoint in it; weights that a killed writer left do not count.
fn refuse_existing(dir: &Path, has_leftovers: bool) -> Result<()> {
    let config = dir.join(CONFIG_FILE);
    if config.exists() {
        return Err(Error::Exists { path: config });
    }
    match weights_file(dir) {
        Some(path) if !has_leftovers => Err(Error::Exists { path }),
        _ => Ok(()),
    }
}

/// A file in `dir` that belongs to a checkpoint's weights.
fn weights_file(dir: &Path) -> Option<PathBuf> {
    let files = files_in(dir).ok()?;
    files.into_iter().find(|path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name == INDEX_FILE || name == SINGLE_FILE || is_shard(name))
    })
}

/// Whether `name` is one that [`shard_name`] gives.
fn is_shard(name: &str) -> bool {
    let middle = name
        .strip_prefix("model-")
        .and_then(|n| n.strip_suffix(".safetensors"));
    middle
        .and_then(|n| n.split_once("-of-"))
        .is_some_and(|(number, of)| {
            let digits = |text: &str| text.len() >= 5 && text.bytes().all(|b| b.is_ascii_digit());
            digits(number) && digits(of)
        })
}

/// The released name of shard `number` (from 0) of `of`.
pub fn shard_name(number: usize, of: usize) -> String {
    if of == 1 {
        return SINGLE_FILE.to_owned();
    }
    format!("model-{:05}-of-{of:05}.safetensors", number + 1)
}

fn files_in(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir)?;
    entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect()
}

fn write_error(path: &Path, source: io::Error, data_bytes: u64) -> Error {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    let path = path.to_owned();
    match source.kind() {
        StorageFull | QuotaExceeded => Error::DiskFull { path, data_bytes },
        _ => Error::Write { path, source },
    }
}
