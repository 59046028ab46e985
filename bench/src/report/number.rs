//! Figures as people read them; what is not a number is a dash.

/// Stands for a figure that there is not.
pub(super) const NONE: &str = "–";

/// Three digits, more before a decimal point.
pub(super) fn figure(value: f64) -> String {
    let decimals = match value.abs() {
        below if below < 9.995 => 2,
        below if below < 99.95 => 1,
        _ => 0,
    };
    decimal(value, decimals)
}

/// So many digits after the point, and commas between thousands.
pub(super) fn decimal(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return NONE.into();
    }
    let text = format!("{:.decimals$}", value.abs());
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let is_zero = text.bytes().all(|byte| matches!(byte, b'0' | b'.'));
    let mut grouped = String::from(if value < 0.0 && !is_zero { "−" } else { "" });
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped + rest
}

/// A ratio such as a speed-up.
pub(super) fn times(ratio: f64) -> String {
    if ratio.is_finite() { format!("{}×", figure(ratio)) } else { NONE.into() }
}

/// A share of one, in per cent. One that is not everything is never rounded to it.
pub(crate) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if !percent.is_finite() {
        return NONE.into();
    }
    let is_whole = percent == percent.round();
    let text = decimal(percent, usize::from(!is_whole));
    if share < 1.0 && text == "100.0" { "99.9 %".into() } else { format!("{text} %") }
}

/// The word for so many.
pub(super) fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{} {}", decimal(count as f64, 0), if count == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_are_shown() {
        let shown = [0.0, 1.234, 9.996, 12.34, 99.96, 1234.5, -0.001].map(figure);
        assert_eq!(shown, ["0.00", "1.23", "10.0", "12.3", "100", "1,234", "0.00"]);
        assert_eq!(decimal(-1234567.0, 1), "−1,234,567.0");
    }

    #[test]
    fn what_is_no_number_is_a_dash() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!([figure(value), times(value), percent(value)], [NONE; 3]);
        }
    }

    #[test]
    fn only_everything_is_all() {
        assert_eq!([1.0, 0.9999, 0.5, 0.125].map(percent), ["100 %", "99.9 %", "50 %", "12.5 %"]);
    }
}
