//! Text from outside as HTML and SVG, and how wide it is when drawn.

/// Of the mean character, in ems: that of the widest of the usual system fonts.
const CHARACTER: f64 = 0.6;

/// Safe between tags and in quoted attributes. Characters that steer a terminal or turn the direction of what follows are
/// shown as replaced.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\t' | '\n' | '\r' => escaped.push(' '),
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => escaped.push('\u{fffd}'),
            _ if character.is_control() => escaped.push('\u{fffd}'),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// At most so many characters; the last one says that some were left out.
pub(super) fn clip(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.into();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// Pixels that a line of text takes, rather too many than too few.
pub(super) fn width(text: &str, font_size: f64) -> f64 {
    let ems = |character: char| if character < '\u{2000}' { CHARACTER } else { 1.0 };
    text.chars().map(ems).sum::<f64>() * font_size
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hostile_text_is_only_text() {
        let hostile = "<script>alert('1')</script> & \"x\" \0\u{1b}[31m\u{202e}\n";
        assert_eq!(
            escape(hostile),
            "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt; &amp; &quot;x&quot; \u{fffd}\u{fffd}[31m\u{fffd} "
        );
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!((clip("größer", 6), clip("größer", 4)), ("größer".into(), "grö…".into()));
        assert_eq!(clip("ab", 0), "…");
    }

    proptest! {
        #[test]
        fn nothing_escapes_from_text(text in any::<String>()) {
            let escaped = escape(&text);
            prop_assert!(!escaped.contains(['<', '>', '"', '\'']));
            prop_assert!(!escaped.chars().any(char::is_control));
        }
    }
}
