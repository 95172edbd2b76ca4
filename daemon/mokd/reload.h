/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOKD_RELOAD_H
#define MOKD_RELOAD_H

#include "server.h"

/*
 * Reads the configuration again, in a work thread, and takes over what may change while mokd runs: log level,
 * administrators, limits, users, Unix groups and the nodes of the rack. A file with an error changes nothing; each
 * error is logged. Asked while one is under way, it reads once more behind that: the file may have changed meanwhile.
 */
void mokd_reload(struct mokd_server *server);

#endif
