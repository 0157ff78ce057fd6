//! Arguments of functions that templates call, as Python takes them: each by its place or by its name.

use minijinja::value::{Kwargs, Rest, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// An error of a call, in our words.
pub(super) fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Takes fuel for text that is about to be made, at minijinja's own price, so that a width does not become memory.
pub(super) fn pay(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes as u64 / 64)
}

/// What a call gave.
pub(super) struct Args {
    by_place: Vec<Value>,
    by_name: Kwargs,
}

impl Args {
    pub fn of(args: &[Value]) -> Result<Args, Error> {
        let (Rest(by_place), by_name) = from_args(args)?;
        Ok(Args { by_place, by_name })
    }

    /// The argument at a place, or of a name where there is one. One that is undefined is not there.
    pub fn get(&self, place: usize, name: &str) -> Result<Option<Value>, Error> {
        let found = match self.by_place.get(place) {
            None if !name.is_empty() => self.by_name.get::<Option<Value>>(name)?,
            found => found.cloned(),
        };
        Ok(found.filter(|v| !v.is_undefined()))
    }

    pub fn required(&self, place: usize) -> Result<Value, Error> {
        self.by_place.get(place).cloned().ok_or_else(|| Error::from(ErrorKind::MissingArgument))
    }

    /// A text that must be there.
    pub fn text(&self, place: usize) -> Result<&str, Error> {
        let given = self.by_place.get(place).ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
        given.as_str().ok_or_else(|| invalid("expected a string"))
    }

    /// A whole number, where one is given that is not none.
    pub fn int(&self, place: usize, name: &str) -> Result<Option<i64>, Error> {
        let given = self.get(place, name)?.filter(|v| !v.is_none());
        given.map(|v| i64::try_from(v).map_err(|_| invalid("expected a whole number"))).transpose()
    }

    pub fn is_true(&self, place: usize, name: &str) -> Result<bool, Error> {
        Ok(self.get(place, name)?.is_some_and(|v| v.is_true()))
    }

    /// Refuses arguments beyond `most` places, and names that no one asked for.
    pub fn done(&self, most: usize) -> Result<(), Error> {
        if self.by_place.len() > most {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        self.by_name.assert_all_used()
    }

    /// The places and the names.
    pub fn into_parts(self) -> (Vec<Value>, Kwargs) {
        (self.by_place, self.by_name)
    }
}
