//! Where an operation lives: one stem, a place in every room.

/// The folder whose files are the list of operations, from the root of the repository.
pub const SPEC_OPS: &str = "reference/m3-spec/src/ops";

/// A place that an operation has or may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Room, in a word.
    pub what: &'static str,
    /// Path from the root, with `{op}` for the stem.
    pub pattern: &'static str,
    /// True where every operation must have a file.
    pub required: bool,
}

/// Every place, in reading order.
pub const PLACES: &[Place] = &[
    place("spec", "reference/m3-spec/src/ops/{op}.rs", true),
    place("reference", "reference/m3-reference/src/ops/{op}.rs", true),
    place("cpu", "kernels/src/cpu/{op}.rs", true),
    place("cuda", "kernels/src/cuda/{op}.rs", false),
    place("gates", "harness/gates/{op}.toml", true),
];

const fn place(what: &'static str, pattern: &'static str, required: bool) -> Place {
    Place {
        what,
        pattern,
        required,
    }
}

/// The path of an operation in a place.
pub fn path(pattern: &str, op: &str) -> String {
    pattern.replace("{op}", op)
}
