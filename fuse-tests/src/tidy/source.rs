//! A Rust source with its comments and literals blanked out, so that rules can look for words.

/// A source text and what a rule wants to know about its lines (numbered from 0 here).
#[derive(Debug)]
pub struct Source {
    /// The lines as they are.
    pub lines: Vec<String>,
    /// The lines with comments, strings and character literals replaced by spaces.
    pub code: Vec<String>,
    /// Whether a line belongs to an item under `#[cfg(test)]` or `#[test]`.
    pub test: Vec<bool>,
    /// Functions: name, first line, last line.
    pub functions: Vec<(String, usize, usize)>,
}

impl Source {
    /// Reads a source text.
    pub fn new(text: &str) -> Source {
        let blanked = blank(text);
        let mut source = Source {
            lines: text.lines().map(str::to_owned).collect(),
            code: blanked.lines().map(str::to_owned).collect(),
            test: Vec::new(),
            functions: functions(&blanked),
        };
        source.code.resize(source.lines.len(), String::new());
        source.test = test_lines(&blanked, source.lines.len());
        source
    }

    /// Counts every line as test code (a file that only tests include).
    pub fn all_test(mut self) -> Source {
        self.test.fill(true);
        self
    }

    /// Line number (from 1) and code of the lines that are not test code.
    pub fn shipped(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.code.iter().zip(&self.test).enumerate();
        lines.filter(|(_, (_, test))| !**test).map(|(at, (code, _))| (at + 1, code.as_str()))
    }

    /// The whole code as one text.
    pub fn text(&self) -> String {
        self.code.join("\n")
    }
}

/// Whether `word` stands in `code` as a word of its own (`::` and `(` belong to the word asked).
pub fn has_word(code: &str, word: &str) -> bool {
    find_words(code, word).next().is_some()
}

/// Offsets at which `word` begins and no identifier character stands before or behind it.
pub fn find_words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let ident = |c: char| c.is_alphanumeric() || c == '_';
    let (first, last) = (word.starts_with(ident), word.ends_with(ident));
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = code[..*at].chars().next_back().is_some_and(ident);
        let behind = code[at + word.len()..].chars().next().is_some_and(ident);
        !(first && before || last && behind)
    })
}

/// Replaces comments and literals by spaces; line breaks stay.
pub fn blank(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = literal_end(&chars, at);
        if end == at {
            out.push(chars[at]);
            at += 1;
            continue;
        }
        out.extend(chars[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
        at = end;
    }
    out
}

/// The end of the comment or literal that begins at `at`; `at` itself if none does.
fn literal_end(chars: &[char], at: usize) -> usize {
    let next = |n: usize| chars.get(at + n).copied().unwrap_or('\0');
    let word_before = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    match chars[at] {
        '/' if next(1) == '/' => find(chars, at, |rest| rest[0] == '\n'),
        '/' if next(1) == '*' => block_end(chars, at),
        '"' => string_end(chars, at + 1),
        'b' if next(1) == '"' && !word_before => string_end(chars, at + 2),
        'r' if !word_before || chars[at - 1] == 'b' => raw_end(chars, at),
        '\'' if next(1) == '\\' => {
            let close = find(chars, at + 3, |rest| rest[0] == '\'');
            (close + 1).min(chars.len())
        }
        '\'' if next(2) == '\'' => at + 3,
        _ => at,
    }
}

fn find(chars: &[char], from: usize, stop: impl Fn(&[char]) -> bool) -> usize {
    (from..chars.len()).find(|at| stop(&chars[*at..])).unwrap_or(chars.len())
}

fn block_end(chars: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < chars.len() {
        let pair = (chars[at], chars.get(at + 1).copied().unwrap_or('\0'));
        match pair {
            ('/', '*') => depth += 1,
            ('*', '/') => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    chars.len()
}

fn string_end(chars: &[char], mut at: usize) -> usize {
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

fn raw_end(chars: &[char], start: usize) -> usize {
    let hashes = chars[start + 1..].iter().take_while(|c| **c == '#').count();
    if chars.get(start + 1 + hashes) != Some(&'"') {
        return start;
    }
    let body = start + 2 + hashes;
    let closes = |rest: &[char]| {
        rest[0] == '"' && rest.len() > hashes && rest[1..=hashes].iter().all(|c| *c == '#')
    };
    (find(chars, body, closes) + 1 + hashes).min(chars.len())
}

fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count()
}

/// The end of the item that begins at `from`: behind its matching brace, or its semicolon.
fn item_end(code: &str, from: usize) -> usize {
    let mut depth = 0i32;
    for (at, byte) in code.bytes().enumerate().skip(from) {
        match byte {
            b'{' | b'(' | b'[' => depth += 1,
            b'}' | b')' | b']' => {
                depth -= 1;
                if depth == 0 && byte == b'}' {
                    return at + 1;
                }
                if depth < 0 {
                    return at;
                }
            }
            b';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    code.len()
}

fn test_lines(code: &str, lines: usize) -> Vec<bool> {
    let mut test = vec![false; lines];
    for marker in ["#[cfg(test)]", "#[test]", "#[cfg(all(test"] {
        for (at, _) in code.match_indices(marker) {
            let behind = code[at..].find(']').map_or(code.len(), |n| at + n + 1);
            let end = item_end(code, behind);
            let last = line_of(code, end.min(code.len()));
            for line in test.iter_mut().take(last + 1).skip(line_of(code, at)) {
                *line = true;
            }
        }
    }
    if code.trim_start().starts_with("#![cfg(test)]") {
        test.fill(true);
    }
    test
}

fn functions(code: &str) -> Vec<(String, usize, usize)> {
    let mut found = Vec::new();
    for at in find_words(code, "fn") {
        let rest = code[at + 2..].trim_start();
        let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if name.is_empty() {
            continue;
        }
        let end = item_end(code, at);
        if code[..end].ends_with('}') {
            found.push((name, line_of(code, at), line_of(code, end)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked() {
        let text = "a /* b /* c */ d */ \"e\\\"f\" 'g' '\\'' r#\"h\"i\"# b\"j\" 'k: l // m";
        let words: Vec<&str> = "a 'k: l".split(' ').collect();
        assert_eq!(blank(text).split_whitespace().collect::<Vec<_>>(), words);
        assert_eq!(blank("\"a\nb\"c"), "  \n  c");
        assert_eq!(blank("for r in x"), "for r in x");
    }

    #[test]
    fn functions_and_tests_have_their_lines() {
        let text =
            "fn a(x: [u8; 3]) -> u8 {\n  1\n}\n#[cfg(test)]\nmod t {\n  fn b() {}\n}\nfn c();";
        let source = Source::new(text);
        assert_eq!(source.functions, [("a".into(), 0, 2), ("b".into(), 5, 5)]);
        let test: Vec<usize> = (0..source.test.len()).filter(|at| source.test[*at]).collect();
        assert_eq!(test, [3, 4, 5, 6]);
        assert_eq!(source.shipped().count(), 4);
    }
}
