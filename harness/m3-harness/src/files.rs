//! Outputs that are there whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Writes `bytes` beside `path`, syncs, and renames into place. A device or a pipe is written to as it is, and a link's
/// target is replaced, not the link.
///
/// # Errors
/// [`Error::Write`]; a regular file then has its older content.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |source: io::Error| Error::Write {
        path: path.to_path_buf(),
        source: plain(source),
    };
    // What exists is named by its own path, whatever links lead there.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if is_special(&target) {
        let mut file = OpenOptions::new()
            .write(true)
            .open(&target)
            .map_err(failed)?;
        return file.write_all(bytes).map_err(failed);
    }
    let parent = parent(&target);
    let mut staged = staged(parent).map_err(failed)?;
    staged.write_all(bytes).map_err(failed)?;
    staged.as_file().sync_all().map_err(failed)?;
    staged
        .persist(&target)
        .map_err(|error| failed(error.error))?;
    // The rename itself is durable once the directory is.
    File::open(parent)
        .and_then(|directory| directory.sync_all())
        .map_err(failed)
}

/// Refuses an output path that could not be written, before any work is done for it.
///
/// # Errors
/// [`Error::Write`].
pub fn check_writable(path: &Path) -> Result<()> {
    let failed = |source: io::Error| Error::Write {
        path: path.to_path_buf(),
        source: plain(source),
    };
    if path.is_dir() {
        return Err(failed(io::Error::other("it is a directory")));
    }
    if is_special(path) {
        let opened = OpenOptions::new().write(true).open(path);
        return opened.map(drop).map_err(failed);
    }
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    staged(parent(&target)).map(drop).map_err(failed)
}

/// Refuses outputs that are one file, or that are an input or lie inside one.
///
/// # Errors
/// [`Error::Input`] naming both.
pub fn check_distinct(outputs: &[&Path], inputs: &[&Path]) -> Result<()> {
    for (number, output) in outputs.iter().enumerate() {
        let place = resolved(output);
        let refused = |other: &Path| {
            let (output, other) = (output.display(), other.display());
            let what = format!("{output}: would overwrite {other}; name another file");
            Err(Error::Input(what))
        };
        if let Some(other) = outputs[..number]
            .iter()
            .find(|other| resolved(other) == place)
        {
            return refused(other);
        }
        if let Some(input) = inputs
            .iter()
            .find(|input| place.starts_with(resolved(input)))
        {
            return refused(input);
        }
    }
    Ok(())
}

/// The path without links; of a file that is not there yet, its directory's.
fn resolved(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| {
        let name = path.file_name().map(PathBuf::from).unwrap_or_default();
        fs::canonicalize(parent(path)).map_or_else(|_| path.to_path_buf(), |dir| dir.join(name))
    })
}

/// Whether something other than a regular file or a directory is there.
fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir())
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The system's answer without the name of a temporary file.
fn plain(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None if error.kind() == io::ErrorKind::Other => error,
        None => io::Error::from(error.kind()),
    }
}

/// A new file with the permissions that the process gives its files, where temporary ones are private.
fn staged(parent: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_stays_a_link_and_its_target_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        write_whole(&link, b"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"new");
    }

    #[test]
    fn a_pipe_is_written_to_and_never_replaced() {
        use std::os::unix::fs::FileTypeExt;
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        let reader = {
            let pipe = pipe.clone();
            std::thread::spawn(move || fs::read(pipe).unwrap())
        };
        write_whole(&pipe, b"said").unwrap();
        assert_eq!(reader.join().unwrap(), b"said");
        assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
    }

    #[test]
    fn an_output_that_is_an_input_or_another_output_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("tokens"), "").unwrap();
        fs::create_dir(at("model")).unwrap();
        std::os::unix::fs::symlink(at("tokens"), at("link")).unwrap();
        let inputs = [at("tokens"), at("model")];
        let inputs: Vec<&Path> = inputs.iter().map(PathBuf::as_path).collect();
        for output in ["tokens", "link", "model/model.safetensors"] {
            assert!(check_distinct(&[&at(output)], &inputs).is_err(), "{output}");
        }
        assert!(check_distinct(&[&at("a"), &at("a")], &inputs).is_err());
        check_distinct(&[&at("a"), &at("b")], &inputs).unwrap();
    }
}
