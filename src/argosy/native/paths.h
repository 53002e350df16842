/* Which instructions may be used: found once at run time, never assumed at compile time.
 *
 * Levels are ordered: each may use what stands below it. Results never depend on the level, only speed does.
 */
#ifndef ARGOSY_PATHS_H
#define ARGOSY_PATHS_H

enum ag_level {
    AG_BASELINE = 0, /* what the compiler may use everywhere */
    AG_CRC = 1,      /* and CRC32C instructions (x86: SSE4.2; arm: crc) */
    AG_AVX2 = 2      /* and AVX2 with F16C (x86 only) */
};

enum ag_level ag_level(void);

#endif
