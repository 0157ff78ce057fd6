//! Splits an answer into what the model thought and what it says: `<think>…</think>` first, then the answer.

use super::markers::held_bytes;

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Pieces of a stream, by kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Split {
    /// Text inside the thought.
    pub reasoning: String,
    /// Text of the answer.
    pub content: String,
}

/// Where the stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space has come: a thought may open.
    Start,
    /// The thought is open, and line ends before it are dropped.
    Opened,
    Inside,
    /// The thought is closed, and white space before the answer is dropped.
    Between,
    Answer,
}

/// The splitter of one answer. A thought may only open an answer: `<think>` later in it is text like any other.
#[derive(Debug, Clone)]
pub struct Reasoning {
    state: State,
    held: String,
}

impl Reasoning {
    /// For the answer to `prompt`. Templates of reasoning models (DeepSeek-R1) end the prompt with the opening mark, and
    /// then the answer begins inside the thought.
    pub fn after_prompt(prompt: &str) -> Reasoning {
        let inside = prompt.trim_end().ends_with(OPEN);
        Reasoning { state: if inside { State::Opened } else { State::Start }, held: String::new() }
    }

    /// Whether text now comes out as the answer's.
    pub fn in_answer(&self) -> bool {
        self.state == State::Answer
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str, out: &mut Split) {
        self.held.push_str(text);
        loop {
            match self.state {
                State::Start => {
                    let trimmed = self.held.trim_start();
                    if let Some(rest) = trimmed.strip_prefix(OPEN) {
                        self.held = rest.to_owned();
                        self.state = State::Opened;
                    } else if OPEN.starts_with(trimmed) {
                        return;
                    } else {
                        self.state = State::Answer;
                    }
                }
                State::Opened => {
                    self.held = self.held.trim_start_matches('\n').to_owned();
                    if self.held.is_empty() {
                        return;
                    }
                    self.state = State::Inside;
                }
                State::Inside => {
                    if let Some(at) = self.held.find(CLOSE) {
                        out.reasoning.push_str(self.held[..at].trim_end_matches('\n'));
                        self.held.drain(..at + CLOSE.len());
                        self.state = State::Between;
                    } else {
                        // Line ends before the closing mark belong to the mark.
                        let kept = self.held.len() - held_bytes(&self.held, &[CLOSE]);
                        let kept = self.held[..kept].trim_end_matches('\n').len();
                        out.reasoning.extend(self.held.drain(..kept));
                        return;
                    }
                }
                State::Between => {
                    self.held = self.held.trim_start().to_owned();
                    if self.held.is_empty() {
                        return;
                    }
                    self.state = State::Answer;
                }
                State::Answer => {
                    out.content.push_str(&self.held);
                    self.held.clear();
                    return;
                }
            }
        }
    }

    /// Ends the text: what was held back comes out.
    pub fn finish(&mut self, out: &mut Split) {
        let held = std::mem::take(&mut self.held);
        if self.state == State::Inside { out.reasoning.push_str(&held) } else { out.content.push_str(&held) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whole, and split at every place.
    fn split(prompt: &str, text: &str) -> (String, String) {
        let cuts = (0..=text.len()).filter(|&i| text.is_char_boundary(i));
        let mut seen: Vec<Split> = cuts
            .map(|i| {
                let (mut r, mut out) = (Reasoning::after_prompt(prompt), Split::default());
                r.push(&text[..i], &mut out);
                r.push(&text[i..], &mut out);
                r.finish(&mut out);
                out
            })
            .collect();
        seen.dedup();
        assert_eq!(seen.len(), 1, "{text:?} depends on where it is cut: {seen:?}");
        let one = seen.remove(0);
        (one.reasoning, one.content)
    }

    #[test]
    fn thoughts_come_first_and_only_there() {
        let case =
            |p: &str, t: &str, r: &str, c: &str| assert_eq!(split(p, t), (r.into(), c.into()), "{t:?}");
        case("", "<think>\nhm\n</think>\n\nYes", "hm", "Yes");
        case("…<think>\n", "hm\n\nso\n</think>\n\nYes\n", "hm\n\nso", "Yes\n");
        case("", "  plain <think> text", "", "  plain <think> text");
        case("", "<thin", "", "<thin");
        case("<think>", "never closed </thi", "never closed </thi", "");
        case("", "<think></think>", "", "");
    }
}
