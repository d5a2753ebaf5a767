//! The files of the repository, as a checkout has them.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders that hold what tools left, not what people wrote.
const LEFT_OUT: [&str; 5] = [".git", "target", "runs", ".venv", "__pycache__"];

/// A text file.
pub struct Text {
    /// Path from the root, with `/`.
    pub path: String,
    /// Content.
    pub text: String,
}

impl Text {
    /// Lines with their numbers, from 1.
    pub fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }

    /// True for a file in that folder, at any depth.
    pub fn lies_in(&self, folder: &str) -> bool {
        self.path
            .strip_prefix(folder)
            .is_some_and(|rest| rest.starts_with('/'))
    }
}

/// The root of the checkout.
pub fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().expect("the test runs in a checkout")
}

/// Every file whose name ends in one of `endings`, sorted by path.
pub fn texts(endings: &[&str]) -> Vec<Text> {
    let root = root();
    let mut paths = Vec::new();
    collect(&root, &mut paths);
    paths.sort();
    let wanted = |path: &PathBuf| {
        endings
            .iter()
            .any(|end| path.to_string_lossy().ends_with(end))
    };
    let read = |path: PathBuf| Text {
        text: fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display())),
        path: path
            .strip_prefix(&root)
            .expect("below the root")
            .to_string_lossy()
            .replace('\\', "/"),
    };
    paths.into_iter().filter(wanted).map(read).collect()
}

fn collect(folder: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if !path.is_dir() {
            paths.push(path);
        } else if !LEFT_OUT.contains(&name.as_str()) {
            collect(&path, paths);
        }
    }
}

/// Fails with every complaint at once.
pub fn none(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}
