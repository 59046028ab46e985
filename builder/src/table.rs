//! Aligned columns for reports, and numbers as people read them.

use std::fmt;

/// Spaces between columns.
const GAP: usize = 2;

/// Rows of cells. The first column is aligned left, the others right.
#[derive(Clone, Debug, Default)]
pub struct Table(Vec<Vec<String>>);

impl Table {
    /// A table with a heading.
    pub fn new<S: Into<String>>(heading: impl IntoIterator<Item = S>) -> Self {
        Self(vec![heading.into_iter().map(Into::into).collect()])
    }

    /// Adds a row.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.0.push(cells.into_iter().map(Into::into).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.0.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.0.iter().filter_map(|row| row.get(column)).map(|cell| width_of(cell)).max()
        };
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
        for row in &self.0 {
            let mut line = String::new();
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                let fill = " ".repeat(width - width_of(cell));
                line += &match column {
                    0 => format!("{cell}{fill}"),
                    _ => format!("{:GAP$}{fill}{cell}", ""),
                };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

fn width_of(cell: &str) -> usize {
    cell.chars().count()
}

/// Bytes in the largest unit that leaves a whole part.
pub fn bytes(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}

/// A count with commas between thousands.
pub fn count(count: u64) -> String {
    indicatif::HumanCount(count).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["", "bytes", "share"]);
        table.row(["embedding", "12", "1.0 %"]);
        table.row(["é", "1234567"]);
        assert_eq!(
            table.to_string(),
            "             bytes  share\nembedding       12  1.0 %\né          1234567\n"
        );
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!((bytes(1536), count(1_234_567)), ("1.50 KiB".into(), "1,234,567".into()));
    }
}
