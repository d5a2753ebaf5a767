//! Outputs that are there whole or not at all.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::error::{Error, Result};

/// Writes `bytes` beside `path`, syncs, and renames into place.
///
/// # Errors
/// [`Error::Write`]; the older content then stands as it was.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |source| Error::Write {
        path: path.to_path_buf(),
        source,
    };
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut staged = staged(parent).map_err(failed)?;
    staged.write_all(bytes).map_err(failed)?;
    staged.as_file().sync_all().map_err(failed)?;
    staged.persist(path).map_err(|error| failed(error.error))?;
    // The rename itself is durable once the directory is.
    File::open(parent)
        .and_then(|directory| directory.sync_all())
        .map_err(failed)
}

/// A new file with the permissions that the process gives its files, where temporary ones are private.
fn staged(parent: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(parent)
}

/// Refuses an output path that could not be written, before any work is done for it.
///
/// # Errors
/// [`Error::Write`].
pub fn check_writable(path: &Path) -> Result<()> {
    let failed = |source| Error::Write {
        path: path.to_path_buf(),
        source,
    };
    if path.is_dir() {
        return Err(failed(std::io::Error::other("it is a directory")));
    }
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    tempfile::NamedTempFile::new_in(parent)
        .map(drop)
        .map_err(failed)
}
