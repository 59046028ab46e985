//! Requests as clients send them, and what is made of them.
