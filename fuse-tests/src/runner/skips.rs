//! The list of allowed skips, `fuse-tests/allowed-skips.txt`: "NAME | NOTE | REASON" lines, where
//! NAME and NOTE are patterns with `*`.

use std::fs;

use crate::paths;

/// The list.
#[derive(Debug, Default)]
pub struct AllowedSkips {
    lines: Vec<(String, String)>,
}

impl AllowedSkips {
    /// Reads the file.
    pub fn load() -> Result<AllowedSkips, String> {
        let path = paths::repository().join("fuse-tests/allowed-skips.txt");
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        AllowedSkips::parse(&text)
    }

    /// Reads the text of the file.
    pub fn parse(text: &str) -> Result<AllowedSkips, String> {
        let mut lines = Vec::new();
        for (number, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let fields: Vec<&str> = line.split('|').map(str::trim).collect();
            match fields.as_slice() {
                [name, note, reason] if !reason.is_empty() => {
                    lines.push(((*name).to_owned(), (*note).to_owned()));
                }
                _ => {
                    let number = number + 1;
                    return Err(format!("allowed-skips.txt:{number}: NAME | NOTE | REASON wanted"));
                }
            }
        }
        Ok(AllowedSkips { lines })
    }

    /// Whether this skip is listed.
    pub fn allow(&self, name: &str, note: &str) -> bool {
        self.lines.iter().any(|(names, notes)| matches(names, name) && matches(notes, note))
    }
}

/// Whether `text` matches `pattern`, in which `*` stands for anything.
pub fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((front, rest)) => text.strip_prefix(front).is_some_and(|text| {
            (0..=text.len()).any(|at| text.is_char_boundary(at) && matches(rest, &text[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_skips_are_allowed() {
        let text = "# comment\nposix::*::link_max | * | FUSE tells no LINK_MAX\n";
        let allowed = AllowedSkips::parse(text).unwrap();
        assert!(allowed.allow("posix::pjdfstest::link_max", "whatever"));
        assert!(!allowed.allow("posix::pjdfstest::link_maximum", ""));
        assert!(AllowedSkips::parse("a | b |").is_err());
    }
}
