//! Standard output, with its errors as values (a closed pipe ends the program quietly).

use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};

use crate::config::{self, Config};
use crate::units::{Error, Result};

/// Where a command writes its answer.
pub struct Out<W: Write = io::Stdout> {
    to: W,
}

impl Out {
    /// Standard output.
    pub fn stdout() -> Self {
        Out { to: io::stdout() }
    }
}

impl<W: Write> Out<W> {
    /// Writes text as it is, at once: a streamed answer shows token by token.
    pub fn text(&mut self, text: &str) -> Result<()> {
        let done = self.to.write_all(text.as_bytes()).and_then(|()| self.to.flush());
        done.map_err(|e| Error::io("standard output", "write", e))
    }

    /// Writes the one object of a `--json` run.
    pub fn json(&mut self, object: &Value) -> Result<()> {
        debug_assert!(object.is_object(), "a program reads one object");
        self.text(&format!("{object}\n"))
    }
}

/// Rows of text as columns: the first is left-aligned, the others right-aligned as numbers are.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[c] - cell.chars().count());
            let gap = if c == 0 { "" } else { "  " };
            line += &if c == 0 { format!("{cell}{pad}") } else { format!("{gap}{pad}{cell}") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// A float for JSON, which has no infinities and no NaN: those become null.
pub fn number(x: f64) -> Value {
    serde_json::Number::from_f64(x).map_or(Value::Null, Value::Number)
}

/// A path for JSON, whose strings are Unicode: other bytes become U+FFFD, as on a terminal.
pub fn path(p: &Path) -> Value {
    p.to_string_lossy().into()
}

/// The effective settings: `{"file": …, "settings": {key: {"value": …, "from": …}}}`.
pub fn config_json(config: &Config) -> Value {
    let settings = config::KEYS.iter().map(|key| {
        let (value, origin) = config.get(key.name);
        let value = match value {
            config::Value::Text(s) => json!(s),
            config::Value::Count(n) => json!(n),
            config::Value::Real(x) => json!(x),
        };
        (key.name.to_owned(), json!({ "value": value, "from": origin.to_string() }))
    });
    json!({ "file": config.file.as_deref().map(path), "settings": Value::Object(settings.collect()) })
}

#[test]
fn columns_line_up() {
    let rows = vec![vec!["a".to_owned(), "1.5".into()], vec!["long".into(), "10.25".into()]];
    assert_eq!(table(&rows), "a       1.5\nlong  10.25\n");
    assert_eq!(number(f64::NAN), Value::Null);
}
