//! When something was measured, in UTC.

const SECONDS_A_DAY: u64 = 24 * 60 * 60;
/// Of the Gregorian calendar, which repeats after them.
const DAYS_IN_400_YEARS: u64 = 146_097;
/// From 1 March of the year 0 to 1 January 1970.
const DAYS_TO_1970: u64 = 719_468;

/// Year, month, day, hour and minute of so many seconds since 1970.
pub(super) fn utc(seconds: u64) -> String {
    let (year, month, day) = date(seconds / SECONDS_A_DAY);
    let minutes = seconds % SECONDS_A_DAY / 60;
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", minutes / 60, minutes % 60)
}

/// Years begin in March here, so that the day that only some have is the last one.
fn date(days_since_1970: u64) -> (u64, u64, u64) {
    let days = days_since_1970 + DAYS_TO_1970;
    let (era, day_of_era) = (days / DAYS_IN_400_YEARS, days % DAYS_IN_400_YEARS);
    let leap_days = day_of_era / 1_460 + day_of_era / 146_096;
    let year_of_era = (day_of_era - leap_days + day_of_era / 36_524) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Five months from March or August on have 153 days.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let year = era * 400 + year_of_era + u64::from(month >= 10);
    (year, if month < 10 { month + 3 } else { month - 9 }, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(utc(1_735_689_599), "2024-12-31 23:59 UTC");
        assert_eq!(utc(4_107_542_400), "2100-03-01 00:00 UTC");
        assert!(utc(u64::MAX).ends_with(" UTC"));
    }

    #[test]
    fn each_day_follows_the_one_before() {
        let mut last = date(0);
        for days in 1..DAYS_IN_400_YEARS {
            let (year, month, day) = date(days);
            let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let months = [31, 28 + u64::from(is_leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
            assert!((1..=months[month as usize - 1]).contains(&day));
            assert!((year, month, day) > last);
            last = (year, month, day);
        }
    }
}
