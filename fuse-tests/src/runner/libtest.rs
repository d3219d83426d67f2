//! Reading what a test executable prints.

/// The counts of one executable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Tests that passed, those that skipped themselves included.
    pub passed: usize,
    /// Tests that failed.
    pub failed: usize,
    /// Tests marked `ignore`.
    pub ignored: usize,
}

/// Everything that was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Printed {
    /// The sum of the "test result:" lines; None if there was none (it crashed).
    pub summary: Option<Summary>,
    /// Names of the failed tests.
    pub failed: Vec<String>,
    /// Names of the ignored tests.
    pub ignored: Vec<String>,
    /// Tests that were begun, in order; the last one is the suspect of a crash.
    pub begun: Vec<String>,
    /// The text of the failures.
    pub details: String,
}

fn number_before(line: &str, word: &str) -> usize {
    let part = line.split([';', '.']).find(|part| part.trim_end().ends_with(word));
    let digits = part.and_then(|part| part.trim().split(' ').next());
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// Reads the standard output of a test executable (or of several, one after the other).
pub fn parse(text: &str) -> Printed {
    let mut printed = Printed::default();
    let mut in_details = false;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("test result: ") {
            let sum = printed.summary.get_or_insert_default();
            sum.passed += number_before(rest, "passed");
            sum.failed += number_before(rest, "failed");
            sum.ignored += number_before(rest, "ignored");
            in_details = false;
        } else if line == "failures:" {
            in_details = !in_details;
        } else if in_details {
            printed.details.push_str(line);
            printed.details.push('\n');
        } else if let Some((name, result)) = test_line(line) {
            if !printed.begun.iter().any(|begun| begun == name) {
                printed.begun.push(name.to_owned());
            }
            match result {
                "FAILED" => printed.failed.push(name.to_owned()),
                result if result.starts_with("ignored") => printed.ignored.push(name.to_owned()),
                _ => {}
            }
        }
    }
    printed
}

/// "test NAME ... RESULT", with a ` - should panic` taken off the name.
fn test_line(line: &str) -> Option<(&str, &str)> {
    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    Some((name.split(" - should panic").next().unwrap_or(name), result.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
running 3 tests
test a::good ... ok
test bad - should panic ... FAILED
test slow ... ignored, takes long

failures:

---- bad stdout ----
it broke

failures:
    bad

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn counts_names_and_details_are_read() {
        let printed = parse(TEXT);
        assert_eq!(printed.summary, Some(Summary { passed: 1, failed: 1, ignored: 1 }));
        assert_eq!((printed.failed, printed.ignored), (vec!["bad".into()], vec!["slow".into()]));
        assert_eq!(printed.details, "\n---- bad stdout ----\nit broke\n\n");
        assert_eq!(parse("test a ... ").summary, None);
        assert_eq!(parse(&format!("{TEXT}{TEXT}")).summary.unwrap().passed, 2);
    }
}
