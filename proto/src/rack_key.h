/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys of the rack's nodes (CURVE, so Curve25519): made, written to and read from files, as text. A secret never leaves
 * its file but into the memory of who asked for it.
 */
#ifndef MOK_RACK_KEY_H
#define MOK_RACK_KEY_H

#include <stddef.h>
#include <stdint.h>

#define MOK_RACK_KEY_BYTES 32
#define MOK_RACK_KEY_TEXT (2 * MOK_RACK_KEY_BYTES + 1) /* hexadecimal digits, terminated */
#define MOK_RACK_KEY_SENTENCE 512

struct mok_rack_key {
    uint8_t public_key[MOK_RACK_KEY_BYTES];
    uint8_t secret_key[MOK_RACK_KEY_BYTES];
};

void mok_rack_key_text(const uint8_t key[static MOK_RACK_KEY_BYTES], char ret[static MOK_RACK_KEY_TEXT]);
/* -MOK_EARG: not 64 hexadecimal digits. */
int mok_rack_key_parse(const char *text, uint8_t ret[static MOK_RACK_KEY_BYTES]);

/* -MOK_ENOTSUP: libzmq has no CURVE. */
int mok_rack_key_generate(struct mok_rack_key *ret);

/*
 * Makes DIR/rack.key (mode 0600) and DIR/rack.pub; never writes over a key that is there. `text` gets the sentence of a
 * failure: -MOK_EEXIST, -MOK_ENOENT, -MOK_EACCESS, -MOK_ERANGE, -MOK_EIO.
 */
int mok_rack_key_write(const char *dir, const struct mok_rack_key *key, char text[static MOK_RACK_KEY_SENTENCE]);

/*
 * Reads a secret key's file, and makes the public key of it. The file must be a regular one of the caller or of root,
 * that nobody else may read: -MOK_EACCESS; -MOK_ENOENT; -MOK_EARG: holds no key; -MOK_EIO.
 */
int mok_rack_key_load(const char *path, struct mok_rack_key *ret, char text[static MOK_RACK_KEY_SENTENCE]);

#endif
