//! Numbers on the command line: a negative one is a value, not a flag, and a wrong one is told in words.

use std::any::TypeId;

use clap::{Arg, Command};

/// Has every option, of subcommands too, take what begins with `-` and is a number. Without this the parser calls `-1` an
/// unexpected argument and names no option; with it, whoever owns the option says what it expects.
pub fn negative_too(command: Command) -> Command {
    command.mut_args(option).mut_subcommands(negative_too)
}

fn option(arg: Arg) -> Arg {
    if !arg.get_action().takes_values() || arg.is_allow_hyphen_values_set() {
        return arg;
    }
    // An option of text may be followed by another option, which is no text of its own; one of numbers by `-inf`.
    match is_number(&arg) && !arg.is_positional() {
        true => arg.allow_hyphen_values(true),
        false => arg.allow_negative_numbers(true),
    }
}

fn is_number(arg: &Arg) -> bool {
    let id = arg.get_value_parser().type_id();
    let whole = [TypeId::of::<u64>(), TypeId::of::<u32>(), TypeId::of::<u16>(), TypeId::of::<usize>()];
    let signed = [TypeId::of::<i64>(), TypeId::of::<i32>(), TypeId::of::<isize>()];
    let real = [TypeId::of::<f64>(), TypeId::of::<f32>()];
    whole.iter().chain(&signed).chain(&real).any(|number| id == *number)
}

/// A usage error without the standard library's words for what is no number.
pub fn in_words(said: &str) -> String {
    const WORDS: [(&str, &str); 4] = [
        ("invalid digit found in string", "expected a whole number, 0 or more"),
        ("cannot parse integer from empty string", "expected a whole number"),
        ("invalid float literal", "expected a number"),
        ("cannot parse float from empty string", "expected a number"),
    ];
    WORDS.iter().fold(said.to_owned(), |said, (from, to)| said.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    /// Every option that takes numbers, of every command: `-1` after it is its own, whatever it makes of it.
    #[test]
    fn no_negative_number_is_taken_for_a_flag() {
        let commands = [crate::cli::Cli::command(), crate::cli::daemon::command()];
        let mut options = 0;
        for command in commands {
            let mut left = vec![(vec![command.get_name().to_owned()], negative_too(command))];
            while let Some((path, command)) = left.pop() {
                for sub in command.get_subcommands() {
                    left.push(([path.clone(), vec![sub.get_name().to_owned()]].concat(), sub.clone()));
                }
                for arg in command.get_arguments().filter(|a| is_number(a) && a.get_long().is_some()) {
                    assert!(
                        arg.is_allow_hyphen_values_set() || arg.is_allow_negative_numbers_set(),
                        "{path:?} {arg}"
                    );
                    let said = command
                        .clone()
                        .try_get_matches_from([
                            "x".to_owned(),
                            format!("--{}", arg.get_long().unwrap()),
                            "-1".into(),
                        ])
                        .map_or_else(|e| e.to_string(), |_| String::new());
                    assert!(!said.contains("unexpected argument"), "{path:?} {arg}: {said}");
                    options += 1;
                }
            }
        }
        assert!(options > 50, "{options}");
    }

    #[derive(Parser)]
    struct Some {
        #[arg(long)]
        count: Option<u32>,
        #[arg(long)]
        name: Option<String>,
        #[arg(long)]
        set: bool,
    }

    #[test]
    fn what_follows_an_option_of_text_may_be_an_option() {
        let parse = |args: &[&str]| negative_too(Some::command()).try_get_matches_from(args);
        assert!(parse(&["x", "--name", "--set"]).is_err());
        let said = parse(&["x", "--count", "-1"]).unwrap_err().to_string();
        assert!(said.contains("invalid value '-1' for '--count"), "{said}");
        let some = <Some as clap::FromArgMatches>::from_arg_matches(&parse(&["x", "--name", "-5"]).unwrap());
        let some = some.ok().unwrap();
        assert_eq!((some.name.as_deref(), some.count, some.set), (Option::Some("-5"), None, false));
    }

    #[test]
    fn wrong_numbers_are_told_in_words() {
        let wrong = |text: &str| text.parse::<u64>().unwrap_err().to_string();
        assert_eq!(in_words(&wrong("x")), "expected a whole number, 0 or more");
        assert_eq!(in_words(&wrong("")), "expected a whole number");
        assert_eq!(in_words(&"x".parse::<f32>().unwrap_err().to_string()), "expected a number");
        assert_eq!(in_words(&"".parse::<f32>().unwrap_err().to_string()), "expected a number");
    }
}
