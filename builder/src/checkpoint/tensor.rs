//! A tensor: where its bytes are, how they are encoded, and reading any range of its rows
//! as f32. A row is everything under one index of the first dimension, so a vector of n values has n
//! rows of one value. Reads go by position and need a staging buffer of at most one row or 256 KiB.

use super::encoding::Encoding;
use super::random;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Encoded bytes read in one go.
const STAGE_BYTES: usize = 256 << 10;

/// How rows lie in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowOrder {
    /// As they are numbered.
    Plain,
    /// Each head's rows alternate between its first and its second half: row `i` of a half is stored
    /// at `2 i` (first) or `2 i + 1` (second). GGUF files of the llama family keep q and k like this.
    Interleaved {
        /// Rows of a head.
        head_dim: usize,
    },
}

impl RowOrder {
    fn stored(self, row: usize) -> usize {
        match self {
            Self::Plain => row,
            Self::Interleaved { head_dim } => {
                let (head, within) = (row / head_dim, row % head_dim);
                let (half, idx) = (within / (head_dim / 2), within % (head_dim / 2));
                head * head_dim + 2 * idx + half
            }
        }
    }
}

/// Which values of a matrix share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleForm {
    /// All of them.
    Tensor,
    /// Those of a row.
    Channel,
    /// Those of a tile.
    Block {
        /// Rows of a tile.
        rows: usize,
        /// Columns of a tile.
        cols: usize,
    },
}

/// The scales of an FP8 or INT8 matrix: values are multiplied by them.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    pub(super) form: ScaleForm,
    /// Row-major in the form's own shape: 1, rows, or tiles.
    pub(super) values: Box<Tensor>,
}

/// Where the encoded bytes come from.
#[derive(Clone, Debug)]
pub(super) enum Source {
    File {
        file: Arc<File>,
        /// Where in the file they start.
        offset: u64,
    },
    /// Made up from a seed: e4m3.
    Random(u64),
    /// One value everywhere: f32.
    Constant(f32),
    /// Made when the checkpoint was opened: f32.
    Values(Arc<[f32]>),
    /// Some rows of another tensor: f32.
    Rows {
        /// The other one.
        of: Box<Tensor>,
        /// Their numbers there.
        rows: Arc<[u32]>,
    },
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub(super) source: Source,
    pub(super) shape: Vec<usize>,
    pub(super) encoding: Encoding,
    pub(super) order: RowOrder,
    pub(super) scale: Option<Scale>,
}

impl Tensor {
    /// One of f32 that is no part of a file.
    pub(super) fn of_values(source: Source, shape: Vec<usize>) -> Self {
        Self { source, shape, encoding: Encoding::F32, order: RowOrder::Plain, scale: None }
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// How the values are stored.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Size of the first dimension; 1 for a scalar.
    pub fn num_rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Values of a row; 1 for a vector.
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Some of its rows, as a tensor of their own.
    pub(super) fn part(&self, rows: Range<usize>) -> Result<Self> {
        if rows == (0..self.num_rows()) {
            return Ok(self.clone());
        }
        ensure!(self.order == RowOrder::Plain, "its rows do not lie in order");
        let start = rows.start as u64 * self.row_bytes() as u64;
        let source = match &self.source {
            Source::File { file, offset } => {
                Source::File { file: Arc::clone(file), offset: offset + start }
            }
            Source::Random(_) => bail!("it is made up as a whole"),
            Source::Constant(value) => Source::Constant(*value),
            Source::Values(values) => {
                let row = self.row_len();
                Source::Values(values[rows.start * row..rows.end * row].into())
            }
            Source::Rows { of, rows: all } => {
                Source::Rows { of: of.clone(), rows: all[rows.clone()].into() }
            }
        };
        let shape = [&[rows.len()], &self.shape[1..]].concat();
        let scale = self.scale.as_ref().map(|scale| scale.part(&rows)).transpose()?;
        Ok(Self { source, shape, encoding: self.encoding, order: self.order, scale })
    }

    fn row_bytes(&self) -> usize {
        self.row_len() / self.encoding.block_len() * self.encoding.block_bytes()
    }

    /// Decodes `rows` into `out`, scales applied.
    pub(super) fn read(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.check_rows(&rows, out.len())?;
        let row_len = self.row_len();
        let at_once = (STAGE_BYTES / self.row_bytes().max(1)).max(1);
        let mut stage = Vec::new();
        let mut next = rows.start;
        for out in out.chunks_mut((at_once * row_len).max(1)) {
            let part = next..next + out.len() / row_len;
            stage.resize(part.len() * self.row_bytes(), 0);
            self.read_stored(part.clone(), &mut stage)?;
            self.encoding.decode(&stage, out);
            if let Some(scale) = &self.scale {
                scale.apply(part.clone(), row_len, out)?;
            }
            next = part.end;
        }
        Ok(())
    }

    /// Copies the stored bytes of `rows` into `out`, row by row in logical order.
    pub(super) fn read_stored(&self, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        let row_bytes = self.row_bytes();
        if self.order == RowOrder::Plain {
            return self.read_at(rows.start, out);
        }
        for (row, out) in rows.zip(out.chunks_mut(row_bytes.max(1))) {
            self.read_at(self.order.stored(row), out)?;
        }
        Ok(())
    }

    fn read_at(&self, stored_row: usize, out: &mut [u8]) -> Result<()> {
        let start = stored_row as u64 * self.row_bytes() as u64;
        match &self.source {
            Source::File { file, offset } => {
                let offset = offset + start;
                let context = format!("reading {} bytes at {offset}", out.len());
                file.read_exact_at(out, offset).context(context)?;
            }
            Source::Random(seed) => random::fill(*seed, start, out),
            Source::Constant(value) => {
                let (values, _) = out.as_chunks_mut();
                values.fill(value.to_le_bytes());
            }
            Source::Values(values) => {
                let (out, _) = out.as_chunks_mut();
                for (out, value) in out.iter_mut().zip(&values[start as usize / 4..]) {
                    *out = value.to_le_bytes();
                }
            }
            Source::Rows { of, rows } => {
                let mut values = vec![0.0; of.row_len()];
                let outs = out.chunks_mut(self.row_bytes().max(1));
                for (&row, out) in rows[stored_row..].iter().zip(outs) {
                    let row = row as usize;
                    of.read(row..row + 1, &mut values)?;
                    let (out, _) = out.as_chunks_mut();
                    out.iter_mut().zip(&values).for_each(|(out, v)| *out = v.to_le_bytes());
                }
            }
        }
        Ok(())
    }

    /// Refuses a range outside the tensor, or a buffer that is not the range's.
    pub(super) fn check_rows(&self, rows: &Range<usize>, out_len: usize) -> Result<()> {
        ensure!(
            rows.start <= rows.end && rows.end <= self.num_rows(),
            "rows {}..{} are outside its {} rows",
            rows.start,
            rows.end,
            self.num_rows()
        );
        let expected = rows.len() * self.row_len();
        ensure!(out_len == expected, "the buffer holds {out_len} values, the rows {expected}");
        Ok(())
    }
}

impl Scale {
    /// Those of some rows.
    fn part(&self, rows: &Range<usize>) -> Result<Self> {
        let values = match self.form {
            ScaleForm::Tensor => (*self.values).clone(),
            ScaleForm::Channel => self.values.part(rows.clone())?,
            ScaleForm::Block { rows: tile, .. } => {
                ensure!(
                    rows.start.is_multiple_of(tile),
                    "row {} is inside of a tile of {tile} rows that has one scale",
                    rows.start
                );
                self.values.part(rows.start / tile..rows.end.div_ceil(tile))?
            }
        };
        Ok(Self { form: self.form, values: Box::new(values) })
    }

    /// Multiplies `values`, which are `rows` of a matrix `row_len` wide, by their scales.
    fn apply(&self, rows: Range<usize>, row_len: usize, values: &mut [f32]) -> Result<()> {
        let (tile_rows, tile_cols) = match self.form {
            ScaleForm::Tensor => (usize::MAX, row_len),
            ScaleForm::Channel => (1, row_len),
            ScaleForm::Block { rows, cols } => (rows, cols),
        };
        let first_tile = rows.start / tile_rows;
        let tiles_across = row_len.div_ceil(tile_cols);
        let scales = self.read(first_tile..(rows.end - 1) / tile_rows + 1, tiles_across)?;
        for (row, values) in rows.zip(values.chunks_mut(row_len)) {
            let scales = &scales[(row / tile_rows - first_tile) * tiles_across..];
            for (values, scale) in values.chunks_mut(tile_cols).zip(scales) {
                values.iter_mut().for_each(|value| *value *= scale);
            }
        }
        Ok(())
    }

    /// The scales of a range of tile rows.
    fn read(&self, tile_rows: Range<usize>, tiles_across: usize) -> Result<Vec<f32>> {
        let flat = Tensor {
            shape: vec![self.values.shape.iter().product::<usize>()],
            ..(*self.values).clone()
        };
        let range = tile_rows.start * tiles_across..tile_rows.end * tiles_across;
        let mut scales = vec![0.0; range.len()];
        flat.read(range, &mut scales).context("reading its scales")?;
        Ok(scales)
    }

    /// One scale for each of `rows`; `None` if scales change within a row.
    pub(super) fn per_row(&self, rows: Range<usize>) -> Result<Option<Vec<f32>>> {
        Ok(match self.form {
            ScaleForm::Tensor => Some(vec![self.read(0..1, 1)?[0]; rows.len()]),
            ScaleForm::Channel => Some(self.read(rows, 1)?),
            ScaleForm::Block { .. } => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_are_taken_apart() {
        let order = RowOrder::Interleaved { head_dim: 6 };
        let stored: Vec<usize> = (0..12).map(|row| order.stored(row)).collect();
        assert_eq!(stored, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}
