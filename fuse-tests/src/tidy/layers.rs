//! Which module may use which: the layer table of the design, bottom first.

use std::path::Path;

use super::source::{Source, find_words};

/// Layers by number. A module uses only modules of lower layers; those of layer 0 may use each
/// other, the others not their neighbours.
pub const LAYERS: [&[&str]; 10] = [
    &["error", "config", "units", "stats", "clock"],
    &["sys"],
    &["device"],
    &["cache", "journal"],
    &["store"],
    &["image"],
    &["tree"],
    &["fs"],
    &["fuse", "control"],
    &["cli", "main"],
];

/// The layer of a top-level module.
pub fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

/// The top-level module of a file below src; None for lib.rs and files elsewhere.
pub fn module_of(file: &Path) -> Option<String> {
    let first = file.strip_prefix("src").ok()?.components().next()?;
    let name = first.as_os_str().to_str()?.trim_end_matches(".rs").to_owned();
    (name != "lib").then_some(name)
}

/// Upward and sideways uses.
pub fn check(file: &Path, source: &Source, add: &mut impl FnMut(usize, String)) {
    let Some(own) = module_of(file) else { return };
    let Some(own_layer) = layer(&own) else {
        add(
            1,
            format!("module {own} stands in no layer: name it in fuse-tests/src/tidy/layers.rs"),
        );
        return;
    };
    for (line, used) in crate_uses(&source.text()) {
        let Some(used_layer) = layer(&used) else {
            add(line, format!("crate::{used} stands in no layer"));
            continue;
        };
        let peers = own_layer == 0 && used_layer == 0;
        if used != own && !peers && used_layer >= own_layer {
            add(line, format!("{own} (layer {own_layer}) uses {used} (layer {used_layer})"));
        }
    }
    climbing(file, source, add);
}

/// `super::` that leaves the top-level module: nothing above it may be named that way.
fn climbing(file: &Path, source: &Source, add: &mut impl FnMut(usize, String)) {
    let depth = file.components().count() - 1;
    let inside = file.file_stem().is_some_and(|stem| stem == "mod");
    let allowed = if inside { depth - 1 } else { depth }.saturating_sub(1);
    let too_far = "super::".repeat(allowed + 1);
    for (line, code) in source.shipped() {
        if find_words(code, &too_far).next().is_some() {
            add(line, format!("{too_far} leaves the top-level module: write crate::"));
        }
    }
}

/// Line (from 1) and module of every `crate::module` and `crate::{module, ..}`.
fn crate_uses(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let ident = |text: &str| -> String {
        text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    for at in find_words(code, "crate::") {
        let line_at = |offset: usize| code[..offset].matches('\n').count() + 1;
        let behind = at + "crate::".len();
        if !code[behind..].starts_with('{') {
            let name = ident(&code[behind..]);
            // A macro of ours (crate::name!) has no layer.
            if !name.is_empty() && !code[behind + name.len()..].starts_with('!') {
                found.push((line_at(at), name));
            }
            continue;
        }
        let mut depth = 0;
        let mut fresh = false;
        for (offset, c) in code[behind..].char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ if depth == 1 && fresh && !c.is_whitespace() => {
                    found.push((line_at(behind + offset), ident(&code[behind + offset..])));
                }
                _ => {}
            }
            if depth == 0 {
                break;
            }
            fresh = depth == 1 && (c == '{' || c == ',' || (fresh && c.is_whitespace()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grouped_uses_are_seen() {
        let code = "use crate::{\n  units::{A, B},\n  fs,\n};\nlet x = crate::cli::run();";
        let uses = crate_uses(code);
        let expected = [(2, "units"), (3, "fs"), (5, "cli")].map(|(n, m)| (n, m.to_owned()));
        assert_eq!(uses, expected);
    }
}
