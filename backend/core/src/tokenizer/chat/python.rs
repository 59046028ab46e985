//! The functions that `transformers` gives to templates and that write as Python writes: JSON with
//! spaces after `:` and `,` and no escaping for HTML, and dates by `strftime`; and what Python answers otherwise.

use super::Prompt;
use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

/// `tojson(indent=None)`. Keys keep their order.
pub(super) fn tojson(value: Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    if let Some(true) = kwargs.get::<Option<bool>>("ensure_ascii")? {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "tojson: ensure_ascii is not supported",
        ));
    }
    kwargs.assert_all_used()?;
    match indent {
        // Python allows any width; no real template indents by more than 8.
        Some(indent) if indent > 64 => {
            Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent is more than 64"))
        }
        Some(indent) => write_json(&value, PrettyFormatter::with_indent(&b" ".repeat(indent))),
        None => write_json(&value, Spaced),
    }
}

/// `is iterable`, which for Python's `None` is false.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

fn write_json(value: &Value, formatter: impl Formatter) -> Result<String, Error> {
    let mut json = Prompt::default();
    // An indented list may be a hundred times as long as what the client has sent.
    value.serialize(&mut Serializer::with_formatter(&mut json, formatter)).map_err(|e| {
        let kind = if e.is_io() { ErrorKind::WriteFailure } else { ErrorKind::BadSerialization };
        Error::new(kind, e.to_string())
    })?;
    String::from_utf8(json.0).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// One line with `", "` and `": "`, the default of Python's `json.dumps`.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// The time now, in UTC: a server's prompts do not depend on where it stands.
pub(super) fn strftime_now(format: String) -> Result<String, Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    strftime(&format, now.as_secs())
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// From the weekday of 1970-01-01 on.
const WEEKDAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// `format` for a number of seconds since 1970, in the C locale.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (year, month, day) = civil(days);
    let weekday = WEEKDAYS[(days % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let written = match letters.next() {
            Some('Y') => format!("{year}"),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => month_name.to_string(),
            Some('b') => month_name[..3].to_string(),
            Some('A') => weekday.to_string(),
            Some('a') => weekday[..3].to_string(),
            Some('H') => format!("{hour:02}"),
            Some('I') => format!("{:02}", (hour + 11) % 12 + 1),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_string(),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_string(),
            Some('%') => "%".to_string(),
            other => {
                let name = other.map_or("%".to_string(), |letter| format!("%{letter}"));
                let message = format!("strftime_now: {name} is not supported");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
        out.push_str(&written);
    }
    Ok(out)
}

/// Year, month and day of a number of days since 1970-01-01. Years are counted from March, so that
/// the leap day comes last, in eras of 400 years (146,097 days).
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;

    #[test]
    fn dates_agree_with_a_calendar_counted_day_by_day() {
        let (mut year, mut month, mut day) = (1970, 1, 1);
        for days in 0..60_000 {
            assert_eq!(civil(days), (year, month, day), "day {days}");
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = match month {
                2 => 28 + u64::from(leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            day += 1;
            if day > length {
                (day, month) = (1, month + 1);
            }
            if month > 12 {
                (month, year) = (1, year + 1);
            }
        }
    }

    #[test]
    fn a_date_is_written_as_python_writes_it() {
        // 2024-02-29 13:05:09 UTC, a Thursday.
        let got = strftime("%d %b %Y|%A %a %B|%I:%M:%S %p|%H|%y-%m|%F %T|100%%", 1_709_211_909);
        assert_eq!(
            got.expect("known letters"),
            "29 Feb 2024|Thursday Thu February|01:05:09 PM|13|24-02|2024-02-29 13:05:09|100%"
        );
        assert!(strftime("%q", 0).is_err() && strftime("%", 0).is_err());
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value = Value::from(Serde(serde_json::json!({
            "b": [1, 2.5, true, null], "a": { "<é>": "'\"\n" }, "e": [], "o": {},
        })));
        let flat = tojson(value.clone(), Kwargs::from_iter([("ensure_ascii", Value::from(false))]));
        assert_eq!(
            flat.expect("writes"),
            r#"{"b": [1, 2.5, true, null], "a": {"<é>": "'\"\n"}, "e": [], "o": {}}"#
        );
        let indented = tojson(value, Kwargs::from_iter([("indent", Value::from(2))]));
        assert_eq!(
            indented.expect("writes"),
            "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"a\": {\n    \
             \"<é>\": \"'\\\"\\n\"\n  },\n  \"e\": [],\n  \"o\": {}\n}"
        );
    }
}
